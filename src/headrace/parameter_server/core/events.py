"""Events that a `Shard` handles, and actions that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain


@dataclass(frozen=True, slots=True)
class Join:
    """A worker becomes a member, or comes back in a new incarnation, or reconnects in the same one.

    In the same incarnation its clock stays, and it repeats its request and its push of an open round.
    """

    worker: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker is no member any more."""

    worker: int


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradient has arrived; that of an earlier incarnation is refused.

    `weight` is that in the mean of its round, 0 if the worker had no data in it; `share` is the share of the round that
    it stands for, if it is a step of its own.
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
    """A worker asks for parameters to begin its next round with.

    `least` is the version that they must have. If all shards take the same gradients into a round, another shard
    decides which, and this one may be behind it.
    """

    worker: int
    incarnation: int = 0
    least: int = 0


@dataclass(frozen=True, slots=True)
class Settle:
    """All leases so far are committed, so that none is given out again.

    `version` is where this shard's versions continue, if it is not further: shards that take the same gradients into a
    round must give it the same number, even if some of them were renewed.
    """

    version: int = 0


@dataclass(frozen=True, slots=True)
class Renew:
    """The parameters have been replaced, by a checkpoint or by their averages."""


@dataclass(frozen=True, slots=True)
class LeasesAhead:
    """The number of leases from the last `Settle` to the next sync point: the last round may have fewer pushes.

    Without this event, every round is full.
    """

    leases: int


@dataclass(frozen=True, slots=True)
class Close:
    """A worker has waited long enough: the round ends with those that have contributed, if it is still open."""

    worker: int


@dataclass(frozen=True, slots=True)
class RoundMembers:
    """Another server has ended a round: here, too, it has the pushes of the same workers that are still members.

    `round` is its number there, `workers` are workers and their incarnations.
    """

    round: int
    workers: tuple[tuple[int, int], ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields in one tuple, which `of` reads."""
        return (self.round, *chain.from_iterable(self.workers))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> RoundMembers:
        """Returns what `numbers` has given; raises ValueError if it is something else."""
        round_, *workers = numbers
        return cls(round_, tuple(zip(workers[::2], workers[1::2], strict=True)))


Event = Join | Leave | Push | Pull | Settle | Renew | LeasesAhead | Close | RoundMembers


class Reason(Enum):
    """Why a push is refused."""

    STRANGER = 1
    """The sender is not a member, or an earlier incarnation."""
    LATE = 2
    """Its round is over; its data is leased again."""
    NOT_FINITE = 3
    """It holds NaN or infinity; its round goes on without it."""
    DUPLICATE = 4
    """Its lease is done here: applied, or refused as not finite."""


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Keep a worker's gradient: it is part of the round's mean."""

    worker: int


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Apply the optimizer to the mean of the gradients of `workers`, in order.

    `staleness` is the number of updates between the parameters that the gradient was computed with and the present
    ones.
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
    """Send a worker the parameters of this version."""

    worker: int
    version: int


Action = Accumulate | ApplyStep | Ack | Refuse | Reply
