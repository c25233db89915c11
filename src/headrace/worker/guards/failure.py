"""The event of an error that ends a process of a run."""

from __future__ import annotations

from headrace.errors import HeadraceError, user_traceback
from headrace.machine.limits import explained
from headrace.spec.events import Failed


def failure_of(rank: int, time_s: float, step: int, error: BaseException) -> Failed:
    """Returns what an error is about; `time_s` is since the run began."""
    told = explained(error)
    if not isinstance(told, HeadraceError):
        return Failed(rank, time_s, step, f"{type(told).__name__}: {told}", user_traceback(told, fallback=True))
    # An error of headrace needs no traceback, but its cause in user code does.
    origin = told.__cause__
    shown = user_traceback(origin, fallback=True) if origin else ""
    cause = f"{type(told).__name__}: {told.what()}"
    return Failed(rank, time_s, step, cause, shown, told.exit_code, told.remedy)
