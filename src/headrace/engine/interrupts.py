"""Ctrl-C during a run: the first ends it in order, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.comm.control import ControlPage

__all__ = ["orderly_interrupts"]


@contextmanager
def orderly_interrupts(page: ControlPage) -> Iterator[None]:
    """Lets this process's first SIGINT set `page.stop` instead of breaking off whatever the engine is doing.

    Outside the main thread, and where somebody else answers SIGINT, everything stays as it is.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def stop(number: int, frame: object) -> None:
        # From now on as before; not by looking at the page, which others' interrupts may have marked.
        signal.signal(signal.SIGINT, before)
        page.stop = 1

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
