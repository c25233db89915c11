"""What a shard is told, and what it wants done: the words between a `Shard` and whoever drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain


@dataclass(frozen=True, slots=True)
class Join:
    """A worker becomes a member, comes again in a new incarnation, or in the same one over another link.

    In the same one it stays where it was; what it has asked, and has given to a round that is open, comes again.
    """

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
    """A worker asks for parameters to begin its next round with.

    Attributes:
        worker: who.
        incarnation: of that worker.
        least: the version that they shall have reached. Where all shards are to take the same gradients into a round,
            another machine says first which, and so they may be behind it.
    """

    worker: int
    incarnation: int = 0
    least: int = 0


@dataclass(frozen=True, slots=True)
class Settle:
    """All leases so far are committed: none of them comes again.

    Attributes:
        version: that this shard counts on from, if it is not further. Where shards take the same gradients into a
            round, all must give it the same number, whatever has renewed some of them.
    """

    version: int = 0


@dataclass(frozen=True, slots=True)
class Renew:
    """The parameters have been replaced by others, a checkpoint's or their averages."""


@dataclass(frozen=True, slots=True)
class LeasesAhead:
    """So many leases come, from the last `Settle` to the next fence: the last round may be short.

    Without this, rounds never are.
    """

    leases: int


@dataclass(frozen=True, slots=True)
class Close:
    """A worker has waited long enough: the round ends with those who have contributed, if it is still the open one."""

    worker: int


@dataclass(frozen=True, slots=True)
class RoundMembers:
    """Another server has ended a round: here, too, it is of the same workers, as far as they are members still.

    Attributes:
        round: its number there.
        workers: whose pushes it is of, and of which incarnation.
    """

    round: int
    workers: tuple[tuple[int, int], ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The same in a row; `of` reads it."""
        return (self.round, *chain.from_iterable(self.workers))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> RoundMembers:
        """Raises:
        ValueError: these are no such numbers.
        """
        round_, *workers = numbers
        return cls(round_, tuple(zip(workers[::2], workers[1::2], strict=True)))


Event = Join | Leave | Push | Pull | Settle | Renew | LeasesAhead | Close | RoundMembers


class Reason(Enum):
    """Why a push is refused."""

    STRANGER = 1
    """From nobody that is a member, or from an earlier incarnation."""
    LATE = 2
    """The round that it was made for is over; its data comes again."""
    NOT_FINITE = 3
    """It holds NaN or infinity; its round goes on without it."""
    DUPLICATE = 4
    """Its lease is done here already: applied, or refused as not finite."""


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Keep a worker's gradient: it is part of the round's mean."""

    worker: int


@dataclass(frozen=True, slots=True)
class ApplyStep:
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


Action = Accumulate | ApplyStep | Ack | Refuse | Reply
