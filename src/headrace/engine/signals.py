"""Ctrl-C and SIGTERM: outside a run SIGTERM ends the command at once; in a run the first signal ends it in order.

Importing this module does not import torch, so that an engine can be made first thing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    # For the type alone: it imports torch.
    from headrace.shared_memory.control_page import ControlPage

EXIT_CODE = 143

_documents: list[bytes] = []
_companions: set[int] = set()


class Terminated(BaseException):
    """A run was ended by SIGTERM, in order: like KeyboardInterrupt, nothing that user code may raise or catch."""


def answer_with(document: bytes) -> None:
    """Lets `terminate` write this to stdout, where a program may wait for the result."""
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
        # Also where the other end of stdout is closed.
        os._exit(EXIT_CODE)


_REPLACED = (signal.default_int_handler, signal.SIG_DFL, terminate)

TERMINATED = "terminated"
"""The status of a run that SIGTERM has ended in order; who ran it ends next."""

ECHO_S = 1.0
"""A SIGTERM so soon after the first is the same wish: `timeout` and others send it to the process and to its group."""


class Interrupts:
    """Attributes:
    terminated: whether SIGTERM came.
    """

    def __init__(self) -> None:
        self.terminated = False

    def status(self, page: ControlPage) -> str:
        """Returns how a run ended whose workers have all done their work."""
        if self.terminated:
            return TERMINATED
        return "interrupted" if page.stop else "ok"


@contextmanager
def orderly_interrupts(page: ControlPage) -> Iterator[Interrupts]:
    """Lets this process's first SIGINT or SIGTERM set `page.stop` instead of breaking off what the engine is doing.

    A second one sets back what was before, and reaches it. Outside the main thread, and where the user's code handles a
    signal, everything stays as it is.
    """
    interrupts = Interrupts()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: handler for number, handler in before.items() if handler in _REPLACED}

    came: list[float] = []

    def stop(number: int, frame: object) -> None:
        # Not by looking at the page, which others' interrupts may have marked.
        came.append(time.monotonic())
        echo = number == signal.SIGTERM and came[-1] - came[0] <= ECHO_S
        if len(came) > 1 and not echo:
            signal.signal(number, ours[number])
            signal.raise_signal(number)
            return
        interrupts.terminated |= number == signal.SIGTERM
        page.stop = 1

    for number in ours:
        signal.signal(number, stop)
    try:
        yield interrupts
    finally:
        for number, handler in ours.items():
            # The command that was asked to end is about to: an echo may still come.
            if not (interrupts.terminated and handler is terminate):
                signal.signal(number, handler)
