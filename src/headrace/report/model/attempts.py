"""A run that was resumed, read as one: what a later attempt did again does not count.

first, killed at 7        0 1 2 3 4 5 6
second, from step 4               4 5 6 7 8 9
read                      0 1 2 3 4 5 6 7 8 9
                          └ first ┘└ second ┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from headrace.spec.events import Evaluated, Event, NonFinite, RunStarted, Saved, Stepped

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Attempt:
    """From one begin of a run to its end, or to its death.

    Attributes:
        started: what was asked for; `started.resumed_step` rounds had been done before.
        events: its own, without what a later attempt did again.
    """

    started: RunStarted
    events: tuple[Event, ...]

    @cached_property
    def steps(self) -> Mapping[int, Sequence[Stepped]]:
        """Each worker's steps, by rank."""
        by_rank: dict[int, list[Stepped]] = defaultdict(list)
        for event in of_kind(Stepped, self.events):
            by_rank[event.rank].append(event)
        return dict(sorted(by_rank.items()))


def attempts(events: Iterable[Event]) -> tuple[Attempt, ...]:
    """Returns the attempts of a run, in order; none where no launcher said that it began.

    Args:
        events: of all processes, by time.
    """
    begun: list[tuple[RunStarted, list[Event]]] = []
    early: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted):
            begun = [(started, _before(event, past)) for started, past in begun]
            begun.append((event, early))
            early = []
        (begun[-1][1] if begun else early).append(event)
    return tuple(Attempt(started, tuple(own)) for started, own in begun)


def of_kind(kind: type[E], events: Iterable[Event]) -> Iterator[E]:
    """Returns the events of one kind."""
    return (event for event in events if isinstance(event, kind))


def _before(started: RunStarted, events: Iterable[Event]) -> list[Event]:
    done = {lease for first, stop in started.resumed_leases for lease in range(first, stop)}
    return [event for event in events if not _is_done_again(event, started.resumed_step, done)]


def _is_done_again(event: Event, step: int, done: Container[int]) -> bool:
    match event:
        case Stepped():
            return event.step >= step and event.lease not in done
        case NonFinite():
            return event.step >= step
        # These say how many rounds were done, not which one.
        case Evaluated() | Saved():
            return event.step > step
    return False
