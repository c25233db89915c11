"""One training loop a file; what a replica synchronizes by names the one that it needs."""

from __future__ import annotations

from headrace.training.synchronization import DataLeases, PeriodicSync
from headrace.worker.control import RunControl
from headrace.worker.loops.base import Loop
from headrace.worker.loops.leased import LeasedLoop
from headrace.worker.loops.lockstep import LockstepLoop
from headrace.worker.loops.periodic import PeriodicLoop
from headrace.worker.session import Session

__all__ = ["Loop", "make_loop"]


def make_loop(session: Session, control: RunControl) -> Loop:
    """Returns the loop that the session's replica brings."""
    match session.replica.sync:
        case DataLeases() as leases:
            return LeasedLoop(session, control, leases)
        case PeriodicSync() as sync:
            return PeriodicLoop(session, control, sync)
        case None:
            return LockstepLoop(session, control)
