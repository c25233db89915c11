"""Who computes which part of the data: a state machine without clocks and sockets.

A round is divided into as many leases as make up a global batch; each is given to one worker. One lease is one push. It
is committed when every shard has that push, and only then is it done; a lease whose push was refused or whose worker
was lost is given out again.

    leases     | 0,0  0,1 | 1,0  1,1 | 2,0  2,1 ║        ║ the sync point: no lease behind it is given out
    worker 0     ═══        ═══        ═══      ║        before all in front of it are committed
    worker 1          ═════════════       ══════║

At a sync point the workers meet: to evaluate, to save, to end. All are told at once which workers meet: those present
then. A worker that joins later waits until the sync point is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

_MOST = 1 << 24


def intervals_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Returns the intervals [first, stop) of a set of numbers."""
    intervals: list[list[int]] = []
    for number in sorted(numbers):
        if intervals and intervals[-1][1] == number:
            intervals[-1][1] += 1
        else:
            intervals.append([number, number + 1])
    return tuple((first, stop) for first, stop in intervals)


def numbers_in(spans: Sequence[Sequence[int]]) -> set[int]:
    """Returns the numbers in some intervals; raises ValueError if these are not intervals, or have too many numbers."""
    pairs = [(first, stop) for first, stop in spans]
    count = sum(stop - first for first, stop in pairs)
    if any(first >= stop for first, stop in pairs) or count > _MOST:
        raise ValueError(f"{len(pairs)} spans hold {count:,} numbers; at most {_MOST:,} can be held")
    return {number for first, stop in pairs for number in range(first, stop)}


class IntervalSet:
    """A set of numbers that needs memory for its gaps alone: leases are done almost in their order.

    `spans` are ascending and do not touch, as `intervals_of` returns them.
    """

    def __init__(self, spans: Sequence[Sequence[int]] = ()) -> None:
        self._firsts = [first for first, _ in spans]
        self._stops = [stop for _, stop in spans]
        self._count = sum(stop - first for first, stop in spans)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number)
        return at > 0 and number < self._stops[at - 1]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(range, self._firsts, self._stops))

    def __len__(self) -> int:
        return self._count

    def add(self, number: int) -> None:
        """Adds a number."""
        if number in self:
            return
        at = bisect_right(self._firsts, number)
        self._firsts.insert(at, number)
        self._stops.insert(at, number + 1)
        self._count += 1
        # With the one behind, then the one before.
        for left in (at, at - 1):
            if 0 <= left < len(self._firsts) - 1 and self._stops[left] == self._firsts[left + 1]:
                del self._stops[left], self._firsts[left + 1]

    def clear(self) -> None:
        """Removes all numbers."""
        self._firsts.clear()
        self._stops.clear()
        self._count = 0

    def intervals(self) -> tuple[tuple[int, int], ...]:
        """Returns the intervals [first, stop)."""
        return tuple(zip(self._firsts, self._stops, strict=True))


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker without a lease asks for one."""

    worker: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Every shard has the push of a lease; only its holder can commit it (-1 for any worker).

    `report` is what the holder says of it, for a `PortionTable`.
    """

    lease: int
    worker: int = -1
    report: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Return:
    """The push of a lease was refused; the lease is free again, if its holder says so."""

    lease: int
    worker: int = -1


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is lost; its lease is free again, unless every shard has its push."""

    worker: int


@dataclass(frozen=True, slots=True)
class Halt:
    """The next sync point comes as soon as the rounds that have begun are done."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The workers have met at the sync point behind `done` rounds; continue to the one at `until`.

    It is ignored if that is another sync point. Worker 0 computes `alone` rounds between them alone.
    """

    done: int
    until: int
    alone: int = 0


Event = Ask | Commit | Return | WorkerLost | Halt | Advance


@dataclass(frozen=True, slots=True)
class Grant:
    """A worker gets a lease: part `part` of round `round`, with the number `round * leases a round + part`.

    `report` is what a `PortionTable` says of it.
    """

    worker: int
    lease: int
    round: int
    part: int
    report: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MeetAtSyncPoint:
    """A worker meets the others after `round` rounds; `meeting` counts the sync points of the run.

    `members` are all who meet, the one that joined first in front.
    """

    worker: int
    round: int
    meeting: int
    members: tuple[int, ...]


Answer = Grant | MeetAtSyncPoint


@dataclass(frozen=True, slots=True)
class LeaseTableState:
    """The state of a `LeaseTable` as JSON values.

    Attributes:
        together: the first lease that is not worker 0's alone.
        next: the next lease to give out: of all, or of each fixed part.
        free: leases that were given out and are free again, as intervals.
        lost, met: workers that are lost, and that were told of the sync point.
        present: workers that are waited for, in the order in which they joined; None for those of the run's start.
        loose: whether any lease goes to any worker, because some are lost, or have none of their own.
    """

    portions: int
    until: int
    begin: int
    together: int
    next: tuple[int, ...]
    free: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...]
    met: tuple[int, ...]
    present: tuple[int, ...] | None
    meetings: int
    asking: tuple[int, ...]
    loose: bool

    def committed(self) -> set[int]:
        """Returns the committed leases behind the last sync point."""
        stride = len(self.next)
        given = {lease for stream, stop in enumerate(self.next) for lease in range(self.begin + stream, stop, stride)}
        return given - numbers_in(self.free) - {lease for lease, _ in self.held}

    def clocks(self) -> tuple[int, ...]:
        """Returns how many rounds behind the last sync point each worker has done, if leases are fixed."""
        streams = Counter(lease % self.portions for lease in self.committed())
        return tuple(streams[worker] for worker in range(len(self.next) if len(self.next) > 1 else 0))

    def detached(self) -> LeaseTableState:
        """Returns the state without workers, with their leases free."""
        free = numbers_in(self.free) | {lease for lease, _ in self.held}
        return replace(self, free=intervals_of(free), held=(), lost=(), met=(), asking=(), present=None, loose=False)


class LeaseTable:
    """Gives out the leases of a run.

    Args:
        fixed: whether worker `w` gets part `w` of every round, so that all compute the same number of rounds; otherwise
            a worker that asks gets the next lease. When a worker is lost, or has joined without a part of its own, the
            others get its leases, and until the sync point any worker that has done its own gets any.
        alone: rounds from the first on that worker 0 computes alone.
        workers: present from the start, and waited for until they ask or are lost.
    """

    def __init__(
        self,
        portions: int,
        until: int,
        first: int = 0,
        fixed: bool = False,
        alone: int = 0,
        workers: Iterable[int] = (),
    ) -> None:
        self.until = until
        self._portions = portions
        self._first = first * portions
        self._fixed = fixed
        self._together = (first + alone) * portions
        self._stride = portions if fixed else 1
        self._next = [first * portions + stream for stream in range(self._stride)]
        self._free: set[int] = set()
        self._held: dict[int, int] = {}
        self._lost: set[int] = set()
        self._loose = False
        self._present = dict.fromkeys(workers)
        self._asking: list[int] = []
        self._met: set[int] = set()
        self._meetings = 0

    def handle(self, event: Event) -> list[Answer]:
        """Returns what the workers are told."""
        if isinstance(event, Ask):
            self._lost.discard(event.worker)
            self._present.setdefault(event.worker)
            if event.worker not in self._asking:
                self._asking.append(event.worker)
            self._loose |= event.worker >= self._portions
        elif isinstance(event, Commit | Return):
            if event.worker in (-1, self._held.get(event.lease)):
                if isinstance(event, Return):
                    self._release([event.lease])
                self._held.pop(event.lease, None)
        elif isinstance(event, WorkerLost):
            self._release([lease for lease, worker in self._held.items() if worker == event.worker])
            self._asking = [worker for worker in self._asking if worker != event.worker]
            self._met.discard(event.worker)
            self._present.pop(event.worker, None)
            self._lost.add(event.worker)
            self._loose = True
        elif isinstance(event, Halt):
            # Rounds end as they have begun: up to the last lease that was given out.
            begun = max(self._next) - self._stride + 1
            self.until = min(self.until, -(-begun // self._portions))
        elif event.done == self.until:
            # Every worker that has met says so; the first one counts.
            self._first = self.until * self._portions
            self._together = self._first + event.alone * self._portions
            self.until = event.until
            self._met.clear()
            self._loose = bool(self._lost) or any(worker >= self._portions for worker in self._present)
        return self._answer()

    def state(self) -> LeaseTableState:
        """Returns the state."""
        return LeaseTableState(
            portions=self._portions,
            until=self.until,
            begin=self._first,
            together=self._together,
            next=tuple(self._next),
            free=intervals_of(self._free),
            held=tuple(self._held.items()),
            lost=tuple(sorted(self._lost)),
            met=tuple(sorted(self._met)),
            present=tuple(self._present),
            meetings=self._meetings,
            asking=tuple(self._asking),
            loose=self._loose,
        )

    def load(self, state: LeaseTableState) -> None:
        """Takes over a saved state; raises ValueError if it is of another number of leases a round."""
        if (state.portions, len(state.next)) != (self._portions, self._stride):
            raise ValueError(
                f"the leases are of {state.portions} portions in {len(state.next)} streams, and this run has "
                f"{self._portions} in {self._stride}; resume with the same strategy and number of workers"
            )
        self.until, self._first, self._together = state.until, state.begin, state.together
        self._next, self._free = list(state.next), numbers_in(state.free)
        self._held = {lease: worker for lease, worker in state.held}
        self._lost, self._met, self._asking = set(state.lost), set(state.met), list(state.asking)
        self._present = self._present if state.present is None else dict.fromkeys(state.present)
        self._meetings = state.meetings
        self._loose = state.loose

    def _release(self, leases: list[int]) -> None:
        for lease in leases:
            if self._held.pop(lease, None) is not None:
                self._free.add(lease)

    def _answer(self) -> list[Answer]:
        answers: list[Answer] = []
        # Leases that are free while workers meet are behind the sync point.
        asking = self._asking[:] if self._left() and not self._met else []
        for worker in asking:
            lease = self._take(worker)
            if lease is not None:
                self._held[lease] = worker
                self._asking.remove(worker)
                answers.append(Grant(worker, lease, *divmod(lease, self._portions)))
        return answers + self._meet()

    def _meet(self) -> list[Answer]:
        """Lets all present workers meet when no lease is left in front of the sync point."""
        if self._met or not self._present or self._held or len(self._asking) < len(self._present) or self._left():
            return []
        members = tuple(self._present)
        self._met.update(members)
        self._asking.clear()
        self._meetings += 1
        return [MeetAtSyncPoint(worker, self.until, self._meetings, members) for worker in members]

    def _left(self) -> bool:
        """Returns whether a lease is left in front of the sync point."""
        stop = self._stop()
        return bool(self._free) or any(lease < stop for lease in self._next)

    def _take(self, worker: int) -> int | None:
        # Of fixed leases a worker takes its own, while no worker is lost or has none of its own.
        streams = [self._next[worker]] if self._fixed and not (self._loose or self._lost) else self._next
        stop = self._stop()
        ready = [*self._free, *(lease for lease in streams if lease < stop)]
        if worker:
            ready = [lease for lease in ready if lease >= self._together]
        fitting = [lease for lease in ready if not self._fixed or lease % self._portions in {worker, *self._lost}]
        lease = min(fitting or (ready if self._loose else ()), default=None)
        if lease in self._free:
            self._free.remove(lease)
        elif lease is not None:
            self._next[lease % self._stride] += self._stride
        return lease

    def _stop(self) -> int:
        """Returns the first lease behind the sync point."""
        return self.until * self._portions
