"""Threads that act together, each with a seat in one meeting: the collective of most tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import PeerLost

T = TypeVar("T")


def together(world: int, act: Callable[[ThreadCollective], T]) -> list[T]:
    """Runs `act` once a rank, at the same time; returns what they returned, by rank.

    Raises:
        Exception: what the first of them raised by itself.
    """
    meeting = ThreadGroup(world)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = act(ThreadCollective(meeting, rank))
        except BaseException as error:
            errors[rank] = error
            meeting.abort(rank)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors.values(), key=lambda error: isinstance(error, PeerLost)):
        raise error
    return [results[rank] for rank in range(world)]
