"""SIGTERM as an exception: what the command line answers it with."""

from __future__ import annotations

from types import FrameType
from typing import NoReturn

__all__ = ["Terminated", "terminate"]


class Terminated(BaseException):
    """SIGTERM came: like KeyboardInterrupt, and unlike SystemExit, nothing that user code may raise or catch."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raises `Terminated`; a handler of signals."""
    raise Terminated
