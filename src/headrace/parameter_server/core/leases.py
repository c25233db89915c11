"""Who computes which portion of the data: a state machine without clocks and sockets.

A round is cut into as many portions as make up a global batch; a lease is one of them, given to one worker. One lease
is one push. It is committed when every shard has that push, and only then is the portion done; what was refused or
lost is given out again.

    portions   | 0,0  0,1 | 1,0  1,1 | 2,0  2,1 ║        ║ the fence: nobody gets a portion behind it
    worker 0     ═══        ═══        ═══      ║        before all that lie in front are committed
    worker 1          ═════════════       ══════║

At a fence the workers meet: to evaluate, to save, to end. All are told at once who meets: those who are present then.
Who comes later waits for the fence to be left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_MOST = 1 << 24


def spans_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Returns where runs of numbers begin, and before which number each ends."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number:
            spans[-1][1] += 1
        else:
            spans.append([number, number + 1])
    return tuple((first, stop) for first, stop in spans)


def numbers_in(spans: Sequence[Sequence[int]]) -> set[int]:
    """Returns the numbers in some spans.

    Raises:
        ValueError: these are none, or there are too many.
    """
    pairs = [(first, stop) for first, stop in spans]
    count = sum(stop - first for first, stop in pairs)
    if any(first >= stop for first, stop in pairs) or count > _MOST:
        raise ValueError(f"{len(pairs)} spans hold {count:,} numbers; at most {_MOST:,} can be held")
    return {number for first, stop in pairs for number in range(first, stop)}


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker wants a portion; it has none."""

    worker: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Every shard has the push of a lease; only who holds the lease can say so (-1 for whoever it is)."""

    lease: int
    worker: int = -1


@dataclass(frozen=True, slots=True)
class Return:
    """The push of a lease was refused; its portion is free again, if it is who holds it that says so."""

    lease: int
    worker: int = -1


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone; what it held and no shard has is free again."""

    worker: int


@dataclass(frozen=True, slots=True)
class Halt:
    """The next fence shall come as soon as the rounds that have been begun are done."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The workers have met; on, to the next fence.

    Attributes:
        done: rounds in front of the fence where they have met; it has been left if it is another one.
        until: rounds that lie in front of the next.
        alone: so many of those between that worker 0 does alone.
    """

    done: int
    until: int
    alone: int = 0


Event = Ask | Commit | Return | WorkerLost | Halt | Advance


@dataclass(frozen=True, slots=True)
class Grant:
    """A worker computes a portion.

    Attributes:
        worker: who.
        lease: its number in the run, `round * portions + part`.
        round: which global batch.
        part: which portion of it.
    """

    worker: int
    lease: int
    round: int
    part: int


@dataclass(frozen=True, slots=True)
class MeetAtSyncPoint:
    """A worker meets the others.

    Attributes:
        worker: who.
        round: rounds that are done.
        meeting: how many meetings there were in the run, this one counted.
        members: all who meet, whoever has been there longest first.
    """

    worker: int
    round: int
    meeting: int
    members: tuple[int, ...]


Answer = Grant | MeetAtSyncPoint


@dataclass(frozen=True, slots=True)
class LeaseTableState:
    """All that is known of a run's leases, as JSON takes it.

    Attributes:
        portions: of a round.
        until: rounds in front of the next fence.
        begin: the first lease behind the last fence.
        together: the first lease that is not worker 0's alone.
        next: the next lease to give out: of all, or of each fixed portion.
        free: leases that were given out and are free again, from each to before another.
        held: lease and worker of each that is given out.
        lost, met: workers that are gone, and that were told of the fence.
        present: workers that are waited for, in the order in which they came; None for those that a run begins with.
        meetings: so far.
        asking: workers, in the order in which they came.
        loose: whether any portion goes to any worker, because some are lost, or have none of their own.
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
        """Returns the leases behind the last fence that every shard has."""
        stride = len(self.next)
        given = {lease for stream, stop in enumerate(self.next) for lease in range(self.begin + stream, stop, stride)}
        return given - numbers_in(self.free) - {lease for lease, _ in self.held}

    def clocks(self) -> tuple[int, ...]:
        """Returns how many rounds behind the last fence each worker has done, where each has portions of its own."""
        streams = Counter(lease % self.portions for lease in self.committed())
        return tuple(streams[worker] for worker in range(len(self.next) if len(self.next) > 1 else 0))

    def detached(self) -> LeaseTableState:
        """Returns it without its workers: what they hold is free."""
        free = numbers_in(self.free) | {lease for lease, _ in self.held}
        return replace(self, free=spans_of(free), held=(), lost=(), met=(), asking=(), present=None, loose=False)


class LeaseTable:
    """The portions of a run.

    Args:
        portions: of a round.
        until: rounds in front of the first fence.
        first: the round to begin with.
        fixed: whether worker `w` of as many as there are portions gets portion `w` of every round, so that all do the
            same number of rounds; else whoever asks gets the next. Where a worker is lost, others get its portions, and
            up to the fence whoever has done its own gets any: nobody is left with rounds that need more than one. Where
            a worker has come that has none of its own, too.
        alone: rounds from the first on that worker 0 does alone.
        workers: who is present from the begin, and waited for until it asks or is lost; others are from when they ask.

    Attributes:
        until: rounds in front of the next fence.
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
            self.until = min(self.until, -(-self._begun() // self._portions))
        elif event.done == self.until:
            # All who have met say so, and the first one counts.
            self._first = self.until * self._portions
            self._together = self._first + event.alone * self._portions
            self.until = event.until
            self._met.clear()
            self._loose = bool(self._lost) or any(worker >= self._portions for worker in self._present)
        return self._answer()

    def state(self) -> LeaseTableState:
        """Returns all that it knows."""
        return LeaseTableState(
            portions=self._portions,
            until=self.until,
            begin=self._first,
            together=self._together,
            next=tuple(self._next),
            free=spans_of(self._free),
            held=tuple(self._held.items()),
            lost=tuple(sorted(self._lost)),
            met=tuple(sorted(self._met)),
            present=tuple(self._present),
            meetings=self._meetings,
            asking=tuple(self._asking),
            loose=self._loose,
        )

    def load(self, state: LeaseTableState) -> None:
        """Becomes what another one was.

        Raises:
            ValueError: that had other portions.
        """
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

    def _begun(self) -> int:
        """Returns one more than the last portion that was given out."""
        return max(self._next) - self._stride + 1

    def _release(self, leases: list[int]) -> None:
        for lease in leases:
            if self._held.pop(lease, None) is not None:
                self._free.add(lease)

    def _answer(self) -> list[Answer]:
        answers: list[Answer] = []
        for worker in self._asking[:]:
            # Whatever is left while they meet lies behind the fence.
            lease = None if self._met else self._take(worker)
            if lease is not None:
                self._held[lease] = worker
                self._asking.remove(worker)
                answers.append(Grant(worker, lease, *divmod(lease, self._portions)))
        return answers + self._meet()

    def _meet(self) -> list[Answer]:
        """Brings all together when there is nothing left in front of the fence; whoever comes later waits outside."""
        if self._met or not self._present or self._held or self._left() or len(self._asking) < len(self._present):
            return []
        members = tuple(self._present)
        self._met.update(members)
        self._asking.clear()
        self._meetings += 1
        return [MeetAtSyncPoint(worker, self.until, self._meetings, members) for worker in members]

    def _take(self, worker: int) -> int | None:
        ready = [*self._free, *(lease for lease in self._next if lease < self._stop())]
        if worker:
            ready = [lease for lease in ready if lease >= self._together]
        own = [lease for lease in ready if not self._fixed or lease % self._portions in {worker, *self._lost}]
        lease = min(own or (ready if self._loose else ()), default=None)
        if lease in self._free:
            self._free.remove(lease)
        elif lease is not None:
            self._next[lease % self._stride] += self._stride
        return lease

    def _left(self) -> bool:
        return bool(self._free) or any(lease < self._stop() for lease in self._next)

    def _stop(self) -> int:
        """Returns the first lease behind the fence."""
        return self.until * self._portions
