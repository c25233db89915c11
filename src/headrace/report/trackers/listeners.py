"""Who is told about a run's events: functions, which get all of them, and trackers, which get some rounds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from headrace.errors import UsageError
from headrace.report.trackers.tracker import Tracker, to_stderr
from headrace.spec.events import Event, Stepped

OnEvent = Callable[[Event], None]
"""Is called with every event of a run."""

_MOST_CHOSEN = 1024
"""So many chosen rounds ago, no worker still does one."""


class RoundSampler:
    """Chooses one round in `every_s` seconds, and the same one of all workers.

    A round is chosen before any worker has told of it, because later some ranks' events have been left out already.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due_s = -math.inf
        self._latest = -1
        self._chosen: dict[int, None] = {}

    def see(self, step: int, time_s: float) -> bool:
        """Takes a worker's step, in each worker's order; returns whether it is of a chosen round."""
        if time_s >= self._due_s:
            self._due_s = time_s + self._every_s
            if self._latest < 0:
                self._chosen[step] = None
            self._chosen[max(self._latest, step) + 1] = None
            if len(self._chosen) > _MOST_CHOSEN:
                del self._chosen[next(iter(self._chosen))]
        self._latest = max(self._latest, step)
        return step in self._chosen


class Listeners:
    """The functions and trackers that a run's caller has named, in their order.

    Raises:
        UsageError: one of them cannot be called with an event.
    """

    def __init__(self, on_event: OnEvent | Sequence[OnEvent] | None) -> None:
        named = () if on_event is None else (on_event,) if callable(on_event) else on_event
        if isinstance(named, str) or not isinstance(named, Sequence) or not all(map(callable, named)):
            raise UsageError(
                f"on_event must be a function of one event, or a list of such functions, got {on_event!r:.60}; "
                "for example on_event=[print, hr.TensorBoard('logs')]"
            )
        self._named = tuple(named)
        self._samplers = {each: RoundSampler(each.every_s) for each in named if isinstance(each, Tracker)}
        self._lines: deque[str] = deque()

    @property
    def skips(self) -> tuple[str, ...]:
        """The kinds of events that no listener wants: without a listener steps are not read, which costs less."""
        return () if self._named else ("stepped",)

    def __call__(self, event: Event) -> None:
        for each in self._named:
            if isinstance(each, Tracker):
                each.say = self._lines.append
                if isinstance(event, Stepped) and not self._samplers[each].see(event.step, event.time_s):
                    continue
            each(event)

    def lines(self) -> Iterator[str]:
        """Yields what trackers have to say since the last call."""
        while self._lines:
            yield self._lines.popleft()

    def close(self) -> Iterator[str]:
        """Blocks until the trackers have written all, also of a run without an end; yields what they have to say."""
        for tracker in self._samplers:
            tracker.flush()
            tracker.say = to_stderr
        yield from self.lines()
