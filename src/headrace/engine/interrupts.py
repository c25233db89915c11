"""Ctrl-C and SIGTERM during a run: the first ends it in order, with a checkpoint; the second at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.engine.termination import terminate
from headrace.shared_memory.control_page import ControlPage

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

    A second one sets back what was before, and reaches it. Outside the main thread, and where somebody else answers a
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
