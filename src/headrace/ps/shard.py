"""What a shard does next: a state machine without tensors, sockets or clocks.

    Push ──► Step, Ack                                  each push a step
             Accumulate; with the round's last Step, Ack   a round a step
             Refuse                                     late, not finite, applied before, or from nobody
    Pull ──► Reply, now or when others have pushed

Whoever drives it owns the parameters and the optimizer and carries the actions out in their order: a server, virtual
time, a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.policies.staleness import Admission, Combination

__all__ = [
    "Accumulate",
    "Ack",
    "Action",
    "Event",
    "Join",
    "Leave",
    "Pull",
    "Push",
    "Reason",
    "Refuse",
    "Renew",
    "Reply",
    "Settle",
    "Shard",
    "Step",
]


@dataclass(frozen=True, slots=True)
class Join:
    """A worker becomes a member, or comes again in a new incarnation."""

    worker: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker is a member no more."""

    worker: int


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradient is there.

    Attributes:
        worker: who has made it.
        incarnation: of that worker; a push of an earlier one is refused.
        lease: of the data that it was made from; one lease is applied once.
        version: of the parameters that it was made with.
        weight: in the mean of its round; 0 if the worker had no data in it.
        share: of the round that it stands for, where it is a step of its own.
        finite: whether all of it is.
    """

    worker: int
    incarnation: int
    lease: int
    version: int
    weight: float = 1.0
    share: float = 1.0
    finite: bool = True


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker asks for parameters to begin its next round with."""

    worker: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Settle:
    """All leases so far are committed: none of them comes again."""


@dataclass(frozen=True, slots=True)
class Renew:
    """The parameters have been replaced by others, a checkpoint's or their averages."""


Event = Join | Leave | Push | Pull | Settle | Renew


class Reason(Enum):
    """Why a push is refused."""

    STRANGER = 1
    """From nobody that is a member, or from an earlier incarnation."""
    LATE = 2
    """The round that it was made for is over; its data comes again."""
    NOT_FINITE = 3
    """It holds NaN or infinity; its round goes on without it."""
    DUPLICATE = 4
    """Its lease is applied here already."""


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Keep a worker's gradient: it is part of the round's mean."""

    worker: int


@dataclass(frozen=True, slots=True)
class Step:
    """Apply the optimizer.

    Attributes:
        workers: the mean of whose gradients is applied, in the order of their numbers.
        share: of a round that it stands for.
        staleness: updates between the parameters that it was made with and those it is applied to.
    """

    workers: tuple[int, ...]
    share: float
    staleness: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Tell a worker that its gradient is applied."""

    worker: int
    lease: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell a worker that its gradient does not count, and why."""

    worker: int
    lease: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Reply:
    """Give a worker the parameters of this version."""

    worker: int
    version: int


Action = Accumulate | Step | Ack | Refuse | Reply


class Shard:
    """One piece of the parameters, as far as it decides anything.

    Args:
        workers: the members at the begin. Learnt from joins alone, the first round would close too early.
        admission: who may begin its next round.
        combination: which pushes make a step.

    Attributes:
        version: rounds that are closed where a round is a step, steps otherwise.
        clocks: rounds that each member has finished.
    """

    def __init__(self, workers: range, admission: Admission, combination: Combination) -> None:
        self.version = 0
        self.clocks: dict[int, int] = dict.fromkeys(workers, 0)
        self._incarnations: dict[int, int] = dict.fromkeys(workers, 0)
        self._admission = admission
        self._combination = combination
        self._applied: set[int] = set()
        self._contributed: dict[int, Push] = {}
        self._waiting: list[int] = []

    def handle(self, event: Event) -> list[Action]:
        """Returns what is to be done, in this order."""
        if isinstance(event, Push):
            return self._push(event)
        if isinstance(event, Pull):
            return self._pull(event)
        if isinstance(event, Settle):
            self._applied.clear()
            return []
        if isinstance(event, Renew):
            self.version += 1
            return []
        return self._change(event)

    def _push(self, push: Push) -> list[Action]:
        worker = push.worker
        if self._incarnations.get(worker) != push.incarnation:
            return [Refuse(worker, push.lease, Reason.STRANGER)]
        if push.lease in self._applied:
            return [Refuse(worker, push.lease, Reason.DUPLICATE)]
        if self._combination.needed(len(self.clocks)):
            return self._contribute(push)
        self.clocks[worker] += 1
        if not push.finite:
            return [Refuse(worker, push.lease, Reason.NOT_FINITE), *self._release()]
        done: list[Action] = []
        if push.weight:
            done.append(Step((worker,), push.share, self.version - push.version))
            self.version += 1
        return [*done, self._acknowledge(push), *self._release()]

    def _contribute(self, push: Push) -> list[Action]:
        worker = push.worker
        if push.version != self.version or worker in self._contributed:
            return [Refuse(worker, push.lease, Reason.LATE)]
        self.clocks[worker] += 1
        self._contributed[worker] = push
        done: list[Action] = []
        if not push.finite:
            done.append(Refuse(worker, push.lease, Reason.NOT_FINITE))
        elif push.weight:
            done.append(Accumulate(worker))
        return [*done, *self._close(), *self._release()]

    def _acknowledge(self, push: Push) -> Ack:
        self._applied.add(push.lease)
        return Ack(push.worker, push.lease)

    def _close(self) -> list[Action]:
        """Ends the round if enough have contributed."""
        needed = self._combination.needed(len(self.clocks))
        if not needed or len(self._contributed) < needed:
            return []
        sound = [push for _, push in sorted(self._contributed.items()) if push.finite]
        workers = tuple(push.worker for push in sound if push.weight)
        self._contributed.clear()
        self.version += 1
        step: list[Action] = [Step(workers, 1.0, 0)] if workers else []
        return [*step, *map(self._acknowledge, sound)]

    def _pull(self, pull: Pull) -> list[Action]:
        if self._incarnations.get(pull.worker) != pull.incarnation:
            return [Refuse(pull.worker, -1, Reason.STRANGER)]
        if pull.worker not in self._waiting:
            self._waiting.append(pull.worker)
        return self._release()

    def _release(self) -> list[Action]:
        if not self._waiting:
            return []
        slowest = min(self.clocks.values())
        ready = [
            worker
            for worker in self._waiting
            if worker not in self._contributed and self._admission.admits(self.clocks[worker], slowest)
        ]
        for worker in ready:
            self._waiting.remove(worker)
        return [Reply(worker, self.version) for worker in ready]

    def _change(self, event: Join | Leave) -> list[Action]:
        worker = event.worker
        if worker in self._waiting:
            self._waiting.remove(worker)
        # What it has given to the round that is open goes with it; the lease comes again.
        self._contributed.pop(worker, None)
        if isinstance(event, Join):
            # Whoever comes late is not behind, and holds nobody up.
            self.clocks.setdefault(worker, min(self.clocks.values(), default=0))
            self._incarnations[worker] = event.incarnation
        else:
            self.clocks.pop(worker, None)
            self._incarnations.pop(worker, None)
        return self._close() + self._release()
