"""What one server does from its order to its end."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from headrace.comm.control import ControlPage
from headrace.data import as_pipeline
from headrace.engine.journal import Journal
from headrace.engine.leased import next_fence
from headrace.engine.order import Order
from headrace.engine.succession import process_number
from headrace.engine.work import user_traceback
from headrace.errors import HeadraceError, PeerLost
from headrace.ps.pairing import Pairing
from headrace.ps.replication import View
from headrace.spec.event import Failed, ServerEnded, ServerStarted
from headrace.strategies.strategy import ServerParts

__all__ = ["serve"]

_TELL_EVERY_S = 1.0


def serve(order: Order, rank: int, page: ControlPage, check: Callable[[], None]) -> None:
    """Holds a rank's shards until the workers have done their work.

    Any error is written down as a `Failed` event before it is raised.

    Args:
        order: the run.
        rank: this server's.
        page: the run's signals.
        check: raises where a process of the run was lost.
    """
    journal = Journal(order.run_dir, rank, order.started)
    server = None
    try:
        process = process_number(page, rank)
        server = order.strategy.server(order.plan, rank, replace(_parts(order), process=process))
        page.addresses[rank].tell(server.address)
        parameter_bytes, _ = server.memory()
        owner = order.plan.server_of(rank)
        shards = sum(segment.owner == owner for segment in order.plan.segments)
        journal.write(ServerStarted(rank, journal.now(), socket.gethostname(), os.getpid(), shards, parameter_bytes))
        told = monotonic()

        def look() -> None:
            nonlocal told
            check()
            if server.pairing:
                _follow_view(server.pairing, page, owner, process)
                page.fates[rank][2] = server.pairing.ready
            if monotonic() - told > _TELL_EVERY_S:
                told = monotonic()
                journal.write(server.tally.event(rank, journal.now()))

        server.serve(look)
        journal.write(server.tally.event(rank, journal.now()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        journal.write(ServerEnded(rank, journal.now(), server.moved_bytes, peak, *server.memory()))
    except PeerLost:
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, HeadraceError) else 1
        cause = f"{type(error).__name__}: {error}"
        journal.write(Failed(rank, journal.now(), 0, cause, user_traceback(error), code))
        raise
    finally:
        if server is not None:
            server.close()
        journal.close()


def _follow_view(pairing: Pairing, page: ControlPage, server: int, process: int) -> None:
    epoch, primary, backup = page.views[server].read()
    address = page.addresses[primary % page.ranks].read() if epoch else ""
    # Whoever is to follow a primary must find it.
    if epoch and (process != backup or address):
        pairing.view(View(epoch, primary, None if backup < 0 else backup), address)


def _parts(order: Order) -> ServerParts:
    job = order.job
    rounds_per_epoch = -(-len(as_pipeline(job.data)[0]) // job.global_batch_size)
    first = order.resume.step if order.resume else 0
    return ServerParts(
        model=order.model,
        optimizer=job.optimizer,
        options=job.options,
        rounds_per_epoch=rounds_per_epoch,
        first=first,
        until=next_fence(order, rounds_per_epoch, first),
    )
