"""The time that a thread spends in collectives: a worker's, while it computes, is no computing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class _Spent(threading.local):
    seconds = 0.0
    inside = False


SPENT = _Spent()
"""The seconds of the thread that reads it. Threads that communicate in the background have their own."""


def counted(call: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Returns a function whose time counts in `SPENT`; once where it calls others that count, too."""

    @functools.wraps(call)
    def timed(*args: _Given.args, **named: _Given.kwargs) -> _Result:
        if SPENT.inside:
            return call(*args, **named)
        began, SPENT.inside = perf_counter(), True
        try:
            return call(*args, **named)
        finally:
            SPENT.inside = False
            SPENT.seconds += perf_counter() - began

    return timed
