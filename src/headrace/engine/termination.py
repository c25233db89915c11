"""SIGTERM, as the command line answers it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import NoReturn

EXIT_CODE = 143

_documents: list[bytes] = []
_companions: set[int] = set()


class Terminated(BaseException):
    """A run was ended by SIGTERM, in order: like KeyboardInterrupt, nothing that user code may raise or catch."""


def answer_with(document: bytes) -> None:
    """Lets `terminate` write this to stdout, for whoever reads the result there."""
    _documents.append(document)


def end_with(pid: int) -> None:
    """Lets `terminate` end a child of this process, too: one that would not see at once that this one is gone."""
    _companions.add(pid)


def leave_alone(pid: int) -> None:
    """Takes that back, before the child is reaped."""
    _companions.discard(pid)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Ends this process at once; a handler of signals.

    Not by an exception: in the middle of an import it would be dropped, or taken for something else. What this
    process has started sees its end and follows, or is ended.
    """
    for pid in _companions:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        os.write(1, _documents[-1] if _documents else b"")
        os.write(2, b"error: terminated (SIGTERM)\n")
    finally:
        # Also where nobody reads any more.
        os._exit(EXIT_CODE)
