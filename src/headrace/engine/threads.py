"""Workers as threads of this process: for debuggers and tests. Nothing is sent, everything can be stepped into."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.engine.base import Engine, RunProgress, orderly_interrupts
from headrace.errors import HeadraceError, PeerLost, UsageError, WorkerFailed
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks
from headrace.spec.plan import has_backups
from headrace.worker.main import work
from headrace.worker.run_spec import RunSpec
from headrace.worker.server import serve
from headrace.worker.state import random_states, restore_random_states

_LOOK_EVERY_S = 0.05


class ThreadEngine(Engine):
    """Runs every worker in a thread. Errors keep their original traceback.

    Workers share the interpreter's lock, torch's one random number generator, and classes and global variables: this is
    slower than processes, dropout is not reproducible with more than one worker, and a loss that looks at what forward
    leaves in a class is refused.

    Examples:
        >>> hr.fit(job, hr.Mirrored(workers=2), engine=hr.ThreadEngine()).status
        'ok'
    """

    in_caller = True

    def run(self, spec: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        if has_backups(spec.plan):
            raise UsageError(
                f"{spec.plan.strategy} has backups, which take over from servers whose processes are lost, and "
                "ThreadEngine has one process; use backups=0, or no engine"
            )
        ranks = len(spec.plan.roles)
        page = ControlPage.create(ranks)
        workers = spec.plan.workers
        group = ThreadGroup(workers, FinishedRanks([record.heartbeat for record in page.ranks[:workers]]))
        errors: dict[int, BaseException] = {}
        building = threading.Lock()

        def body(rank: int) -> None:
            try:
                if rank >= workers:
                    serve(spec, rank, page, ThreadCollective(group, 0).check)
                else:
                    # As a process has it, a worker has a loss of its own, whose state it may change.
                    own = replace(spec, job=replace(spec.job, loss=_copied(spec.job.loss)))
                    work(own, rank, ThreadCollective(group, rank), page, building)
            except BaseException as error:  # raised by the caller below
                errors.setdefault(rank, error)
                group.abort(rank)

        threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}") for rank in range(ranks)]
        states = random_states(torch.device("cpu"))
        with orderly_interrupts(page) as interrupts:
            for thread in threads:
                thread.start()
            try:
                while any(thread.is_alive() for thread in threads):
                    for thread in threads:
                        thread.join(_LOOK_EVERY_S / ranks)
                    group.check_parted()
                    progress(RunProgress.read(page))
            except BaseException:
                # A thread cannot be ended from outside; it ends itself after its present step, or at the next barrier.
                page.stop = 1
                group.abort(0)
                raise
            finally:
                restore_random_states(states, torch.device("cpu"))
                page.segment.close()
        for rank, error in errors.items():  # the first explains the others
            if isinstance(error, PeerLost):
                continue
            if isinstance(error, HeadraceError):
                raise error
            cause = f"{type(error).__name__}: {error}"
            raise WorkerFailed(rank, spec.plan.roles[rank].host, cause, part=spec.plan.part_of(rank)) from error
        return interrupts.status(page)

    def close(self) -> None:
        """Nothing is left when `run` returns."""


def _copied(loss: Any) -> Any:
    """Returns a copy of an object that is a loss; of a function, which may have closed over anything, itself."""
    if loss is None or isinstance(loss, FunctionType):
        return loss
    try:
        return copy.deepcopy(loss)
    except Exception:  # whatever a user's object raises that has no copy
        return loss
