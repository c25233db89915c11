"""What the thread of a worker does, read from its stack by another thread: nothing is noted while it trains."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

from headrace import internals
from headrace.errors import LIBRARIES

_HEADRACE = str(Path(__file__).parents[2])

_ACTIVITIES = {
    internals.COMPILER: "compiles",
    "torch.autograd": "is in backward",
    "headrace.collectives": "is in a collective",
    "headrace.checkpoint": "saves",
    "headrace.worker.saving": "saves",
    "headrace.worker.evaluations": "evaluates",
    "headrace.data": "reads data",
    "headrace.training.update": "updates parameters",
    "headrace.training.optimizer": "updates parameters",
    "headrace.training": "is in forward",
    "headrace.pipeline": "is in a step of the pipeline",
    "headrace.worker.session": "builds the model",
    "headrace.worker.callbacks": "is in a callback",
    "headrace.worker": "is in its loop",
}
"""By the module of a frame: of the innermost frame that has a line here."""


def activity_of(thread: int) -> str:
    """Returns what a thread does, "evaluates (metrics.py, line 12, in slow)"; "" if it has ended."""
    frame = internals.frames_of_threads().get(thread)
    place, doing = "", ""
    while frame is not None and not doing:
        place = place or _place(frame)
        doing = _named(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    doing = doing or "runs code of its own" * bool(place)
    return f"{doing} ({place})" if place else doing


def _named(module: str) -> str:
    while module:
        if module in _ACTIVITIES:
            return _ACTIVITIES[module]
        module = module.rpartition(".")[0]
    return ""


def _place(frame: FrameType) -> str:
    """Returns where a frame is if it is one of user code; else ""."""
    code = frame.f_code
    if code.co_filename.startswith(("<frozen ", _HEADRACE)) or LIBRARIES.match(code.co_filename):
        return ""
    return f"{Path(code.co_filename).name}, line {frame.f_lineno}, in {code.co_name}"
