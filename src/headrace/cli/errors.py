"""Every error's way to the user: one message, the user's own frames, the exit code."""

from __future__ import annotations

import os
import sysconfig
import traceback
from enum import IntEnum
from pathlib import Path
from typing import Any, TextIO

from headrace.engine.termination import Terminated
from headrace.errors import HeadraceError, PeerLost, WorkerFailed

_HEADRACE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class ExitCode(IntEnum):
    """What a process of headrace exits with; `launch` exits with its script's own code."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    PEER_LOST = 4
    DATA = 5
    INTERRUPTED = 130
    TERMINATED = 143


def exit_code(error: HeadraceError) -> int:
    """Returns what the process exits with; a worker's error keeps its own code."""
    return error.worker_exit_code if isinstance(error, WorkerFailed) else error.exit_code


def error_document(error: BaseException, code: int) -> dict[str, Any]:
    """Returns the error as a JSON document."""
    facts: dict[str, Any] = {"type": type(error).__name__, "message": _message(error), "exit_code": code}
    if isinstance(error, WorkerFailed | PeerLost):
        facts |= {"rank": error.rank, "host": error.host, "cause": error.cause}
    notes = _notes(error)
    if notes:
        facts["notes"] = notes
    frames = _traceback(error)
    if frames:
        facts["traceback"] = frames
    return {"error": facts}


def write_error(stream: TextIO, error: BaseException) -> None:
    """Writes the message, and the traceback of the user's own code as the last thing, where there is one."""
    lines = [f"error: {_message(error)}", *_notes(error)]
    frames = _traceback(error)
    if frames:
        lines += ["", frames]
    print("\n".join(lines), file=stream, flush=True)


def user_traceback(error: BaseException) -> str:
    """Returns the traceback from the first frame of user code on, without headrace's frames.

    Empty if the error met no user code. A syntax error has no frame of its own and is shown as it is.
    """
    shown = traceback.TracebackException.from_exception(error)
    frames = _user_frames(shown)
    if not frames and not isinstance(error, SyntaxError):
        return ""
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format()).rstrip("\n")


def user_place(error: BaseException) -> str:
    """Returns the last line of user code that the error came through, "job.py, line 12"; empty if none."""
    frames = _user_frames(traceback.TracebackException.from_exception(error))
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def _user_frames(shown: traceback.TracebackException) -> list[traceback.FrameSummary]:
    frames = [frame for frame in shown.stack if not _is_ours(frame.filename)]
    while frames and frames[0].filename.startswith(_LIBRARIES):
        del frames[0]
    return frames


def _is_ours(filename: str) -> bool:
    # "<frozen importlib...>" loads the file, "<string>" is what `dataclass` wrote for us.
    return filename.startswith(("<", _HEADRACE))


def _traceback(error: BaseException) -> str:
    if isinstance(error, WorkerFailed):
        return error.traceback.rstrip("\n")
    if isinstance(error, HeadraceError) and error.__cause__ is not None:
        return user_traceback(error.__cause__)
    return ""


def _notes(error: BaseException) -> list[str]:
    # A worker's traceback is a note for those who see the error in Python; here it is shown by itself.
    own = error.traceback.rstrip() if isinstance(error, WorkerFailed) else None
    return [note for note in getattr(error, "__notes__", ()) if note != own]


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (SIGINT)"
    if isinstance(error, Terminated):
        return "terminated (SIGTERM)"
    return str(error)
