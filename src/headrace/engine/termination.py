"""SIGTERM, as the command line answers it."""

from __future__ import annotations

import os
from types import FrameType
from typing import NoReturn

__all__ = ["EXIT_CODE", "Terminated", "answer_with", "terminate"]

EXIT_CODE = 143

_documents: list[bytes] = []


class Terminated(BaseException):
    """A run was ended by SIGTERM, in order: like KeyboardInterrupt, nothing that user code may raise or catch."""


def answer_with(document: bytes) -> None:
    """Lets `terminate` write this to stdout, for whoever reads the result there."""
    _documents.append(document)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Ends this process at once; a handler of signals.

    Not by an exception: in the middle of an import it would be dropped, or taken for something else. What this
    process has started sees its end and follows.
    """
    try:
        os.write(1, _documents[-1] if _documents else b"")
        os.write(2, b"error: terminated (SIGTERM)\n")
    finally:
        # Also where nobody reads any more.
        os._exit(EXIT_CODE)
