"""A launcher's process that cannot take part says so, so that no other waits for it, and rank 0 prints why."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from time import monotonic
from types import TracebackType

from headrace.engine.torchrun.address import launched_ranks
from headrace.engine.torchrun.key_value import Failure, StoreClient
from headrace.engine.torchrun.store import first_failed, reached
from headrace.errors import HeadraceError, PeerLost, PeersApart, UsageError, WorkerFailed
from headrace.machine.identity import host_name

TELL_S = 10.0
"""How long a process that fails waits for rank 0, and rank 0 for the others."""

_ENDED = "headrace/ended"
_AGAIN_S = 0.05

begun = threading.Event()
"""Is set when the processes have formed a group; then they notice each other's ends themselves."""


def tell(error: BaseException, code: int = 1) -> BaseException:
    """Tells the other processes that this one fails before the run; returns the error that it should show.

    That is one line that names rank 0 where rank 0 shows the same error.
    """
    try:
        world = launched_ranks() or 1
    except UsageError:
        return error
    store = None if world == 1 or begun.is_set() else reached(TELL_S)
    if store is None:
        return error
    rank, heard = int(os.environ["RANK"]), isinstance(error, WorkerFailed)
    lost = error.rank if isinstance(error, PeerLost | PeersApart) else -1
    own = Failure(rank=rank, host=host_name(), cause=str(error) or type(error).__name__, code=code, lost=lost)
    try:
        why, leading = store.end(own, rank == 0, TELL_S)
        if rank == 0:
            atexit.register(_await_others, store, world - 1)
            return error if why == own else WorkerFailed(why["rank"], why["host"], why["cause"], exit_code=why["code"])
        store.add(_ENDED, 1)
    except (OSError, HeadraceError):
        return error
    if heard or why["cause"] == own["cause"] or lost == why["rank"]:
        return first_failed(leading["host"], code)
    return error


def tell_uncaught() -> None:
    """Lets this process tell the others when an exception ends it."""
    show = sys.excepthook
    if show.__module__ == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shown = tell(error) if isinstance(error, Exception) else error
        show(type(shown), shown, traceback if shown is error else None)

    sys.excepthook = hook


def _await_others(store: StoreClient, others: int) -> None:
    """Serves the store until the others know why rank 0 ends."""
    give_up, pause = monotonic() + TELL_S, threading.Event()
    while store.add(_ENDED, 0) < others and monotonic() < give_up:
        pause.wait(_AGAIN_S)
