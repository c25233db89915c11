"""Who computes which portion of a large batch, evaluation by evaluation: a state machine without clocks and sockets.

A round is one step of a batch optimizer: some evaluations of the loss and the gradient, each over all portions of the
same batch. Portions are handed out on demand. A portion that a slow worker has is handed out once more, to a worker
that has nothing else to do, and the first answer counts. Between two evaluations one worker steers: it runs the
optimizer up to the point that is evaluated next, or to the end of the round.

    worker 0   ═p0═ ═p2═ ═p3═ ═p4═ ─steers─ ═p0═ ═p2═
    worker 1   ═p1══════════════════        ═p1══════     p1 was too slow: worker 2 computed it, too
    worker 2   ═══════ ═p5═ ═p1═            ═══════

Dean et al., "Large scale distributed deep networks", 2012, section 4.2 (Sandblaster L-BFGS).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.parameter_server.core.leases import (
    Advance,
    Answer,
    Ask,
    Commit,
    Event,
    Grant,
    Halt,
    MeetAtSyncPoint,
    Return,
    WorkerLost,
)

_SLOWER_BY = 2
"""A portion is handed out again to a worker that has done so many more of the evaluation than all that have it."""


@dataclass(frozen=True, slots=True)
class PortionTableState:
    """The state of a `PortionTable` as JSON values.

    Attributes:
        serial: number of the evaluation in the run.
        evaluation: its number in the round.
        done: portions that are done, each with its loss and weight.
        holders: pairs of a portion and a worker that computes it, in the order in which they began.
        counts: by worker, how many portions of the evaluation it has done.
        results: loss and weight of each evaluation of the round that is done.
        met, present, asking: as of `LeaseTableState`.
    """

    portions: int
    until: int
    round: int
    serial: int
    evaluation: int
    done: tuple[tuple[float, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    results: tuple[float, ...]
    met: tuple[int, ...]
    present: tuple[int, ...] | None
    meetings: int
    asking: tuple[int, ...]

    def detached(self) -> PortionTableState:
        """Returns the state without workers."""
        return replace(self, holders=(), counts=(), met=(), asking=(), present=None)


class PortionTable:
    """Gives out the portions of each evaluation, and the steering between them.

    A lease has the number `serial * (portions + 1) + part`; part `portions` is the steering. The report of a committed
    portion is its mean loss and its weight; that of committed steering is 1 if another evaluation follows, 0 at the end
    of the round. The report of a granted portion is the number of the evaluation in its round; that of granted
    steering is loss and weight of each evaluation of the round.

    Args:
        first: the round that the run begins with; the first sync point is before round `until`.
        workers: present from the start, and waited for until they ask or are lost.
    """

    def __init__(self, portions: int, until: int, first: int = 0, workers: Iterable[int] = ()) -> None:
        self.until = until
        self._portions = portions
        self._round = first
        self._serial = 0
        self._evaluation = 0
        self._done: dict[int, tuple[float, float]] = {}
        self._holders: dict[int, list[int]] = {}
        self._counts: Counter[int] = Counter()
        self._results: list[float] = []
        self._present = dict.fromkeys(workers)
        self._asking: list[int] = []
        self._met: set[int] = set()
        self._meetings = 0

    def handle(self, event: Event) -> list[Answer]:
        """Returns what the workers are told; raises ValueError if a commit does not say what it must."""
        if isinstance(event, Ask):
            self._present.setdefault(event.worker)
            if event.worker not in self._asking:
                self._asking.append(event.worker)
        elif isinstance(event, Commit):
            self._commit(event)
        elif isinstance(event, Return):
            self._release(event.worker, event.lease)
        elif isinstance(event, WorkerLost):
            self._release(event.worker)
            self._asking = [worker for worker in self._asking if worker != event.worker]
            self._met.discard(event.worker)
            self._present.pop(event.worker, None)
        elif isinstance(event, Halt):
            begun = bool(self._evaluation or self._done or self._holders)
            self.until = min(self.until, self._round + begun)
        elif isinstance(event, Advance) and event.done == self.until:
            # Every worker that has met says so; the first one counts.
            self.until = event.until
            self._met.clear()
        return self._answer()

    def state(self) -> PortionTableState:
        """Returns the state."""
        return PortionTableState(
            portions=self._portions,
            until=self.until,
            round=self._round,
            serial=self._serial,
            evaluation=self._evaluation,
            done=tuple((float(part), *result) for part, result in self._done.items()),
            holders=tuple((part, worker) for part, workers in self._holders.items() for worker in workers),
            counts=tuple(self._counts.items()),
            results=tuple(self._results),
            met=tuple(sorted(self._met)),
            present=tuple(self._present),
            meetings=self._meetings,
            asking=tuple(self._asking),
        )

    def load(self, state: PortionTableState) -> None:
        """Takes over a saved state; raises ValueError if it is of another number of portions."""
        if state.portions != self._portions:
            raise ValueError(f"the state is of {state.portions} portions a batch, and this run has {self._portions}")
        self.until, self._round = state.until, state.round
        self._serial, self._evaluation = state.serial, state.evaluation
        self._done = {int(part): (loss, weight) for part, loss, weight in state.done}
        self._holders = {}
        for part, worker in state.holders:
            self._holders.setdefault(part, []).append(worker)
        self._counts = Counter({worker: count for worker, count in state.counts})
        self._results, self._meetings = list(state.results), state.meetings
        self._met, self._asking = set(state.met), list(state.asking)
        self._present = self._present if state.present is None else dict.fromkeys(state.present)

    def _commit(self, event: Commit) -> None:
        serial, part = divmod(event.lease, self._portions + 1)
        if serial != self._serial or part in self._done:
            # Another worker was faster.
            self._release(event.worker, event.lease)
            return
        if part < self._portions:
            if len(event.report) != 2:
                raise ValueError(f"a portion is committed with its loss and weight, got {len(event.report)} numbers")
            self._done[part] = (event.report[0], event.report[1])
            self._holders.pop(part, None)
            self._counts[event.worker] += 1
            if len(self._done) == self._portions:
                # Summed in the order of the portions.
                every = [self._done[part] for part in range(self._portions)]
                weight = sum(portion for _, portion in every)
                self._results += (sum(loss * portion for loss, portion in every) / weight if weight else 0.0), weight
        elif self._steers:
            if len(event.report) != 1:
                raise ValueError(f"steering is committed with one number, got {len(event.report)}")
            ends = not event.report[0]
            self._serial += 1
            self._evaluation = 0 if ends else self._evaluation + 1
            self._done.clear()
            self._holders.clear()
            self._counts.clear()
            if ends:
                self._round += 1
                self._results.clear()

    @property
    def _steers(self) -> bool:
        """Whether all portions are done, so that a worker must steer."""
        return len(self._done) == self._portions

    def _release(self, worker: int, lease: int = -1) -> None:
        """Ends what a worker computes, or one lease of it."""
        serial, of = divmod(lease, self._portions + 1)
        if lease >= 0 and serial != self._serial:
            return
        for part in [of] if lease >= 0 else list(self._holders):
            left = [other for other in self._holders.get(part, ()) if other != worker]
            self._holders.pop(part, None)
            if left:
                self._holders[part] = left

    def _answer(self) -> list[Answer]:
        if self._met:
            return []
        answers: list[Answer] = []
        # The fastest in front: the others wait little for the worker that steers.
        for worker in sorted(self._asking, key=lambda rank: -self._counts[rank]) if self._round < self.until else ():
            part = self._choose(worker)
            if part is None:
                continue
            self._holders.setdefault(part, []).append(worker)
            self._asking.remove(worker)
            report = tuple(self._results) if part == self._portions else (float(self._evaluation),)
            answers.append(Grant(worker, self._serial * (self._portions + 1) + part, self._round, part, report))
        return answers + self._meet()

    def _choose(self, worker: int) -> int | None:
        """Returns what a worker gets: steering, the next portion, or one that a slower worker has."""
        if self._steers:
            return None if self._holders else self._portions
        left = [part for part in range(self._portions) if part not in self._done]
        free = next((part for part in left if part not in self._holders), None)
        if free is not None:
            return free
        slow = (
            part for part in left
            if all(self._counts[worker] >= self._counts[holder] + _SLOWER_BY for holder in self._holders[part])
        )  # fmt: skip
        return next(slow, None)

    def _meet(self) -> list[Answer]:
        """Lets all present workers meet when the rounds in front of the sync point are done."""
        if self._round < self.until or not self._present or len(self._asking) < len(self._present):
            return []
        members = tuple(self._present)
        self._met.update(members)
        self._asking.clear()
        self._meetings += 1
        return [MeetAtSyncPoint(worker, self.until, self._meetings, members) for worker in members]
