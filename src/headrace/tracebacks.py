"""Tracebacks as a user reads them: from user code on, without headrace's frames."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_HEADRACE = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def user_traceback(error: BaseException, fallback: bool = False) -> str:
    """Returns the traceback from the first frame of user code on, without headrace's frames.

    A syntax error has no frame of its own and is shown as it is. Where no user code was running the result is "", or
    with `fallback` the frames of libraries, or if there are none all frames.
    """
    shown = traceback.TracebackException.from_exception(error)
    frames = _user_frames(shown)
    if not frames and fallback:
        frames = [frame for frame in shown.stack if not _is_ours(frame)] or list(shown.stack)
    elif not frames and not isinstance(error, SyntaxError):
        return ""
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format()).rstrip("\n")


def user_place(error: BaseException) -> str:
    """Returns the last line of user code in the traceback, "job.py, line 12"; empty if there is none."""
    frames = _user_frames(traceback.TracebackException.from_exception(error))
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def _user_frames(shown: traceback.TracebackException) -> list[traceback.FrameSummary]:
    frames = [frame for frame in shown.stack if not _is_ours(frame)]
    # A library's compiled frame has a relative name: "uvloop/loop.pyx".
    while frames and (frames[0].filename.startswith(_LIBRARIES) or frames[0].filename.endswith(".pyx")):
        del frames[0]
    return frames


def _is_ours(frame: traceback.FrameSummary) -> bool:
    # "<frozen importlib...>" loads a file, and `dataclass` writes methods in "<string>".
    generated = frame.filename == "<string>" and frame.name.startswith("__")
    return generated or frame.filename.startswith(("<frozen ", _HEADRACE))
