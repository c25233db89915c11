"""What the workers of a strategy do in a round, as data: all that a simulation, a bound or a rehearsal asks of it.

    exchange     what replicas do with each other: a `GradientSum`, `ParameterMean`, `NeighbourMean` or
                 `ServerTerms`; None where each trains alone
    division     what holds one replica: a pipeline's `Stages`, `Slices` of layers, or a `RingOfTokens`; None for one
                 device

Numbers are those of as many workers as the strategy was asked for: `Strategy.behave`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.policies.period import AutoPeriod
    from headrace.policies.staleness import Admission, Combination


@dataclass(frozen=True)
class GradientSum:
    """All replicas sum their gradients in every round.

    Attributes:
        sent: bytes on the wire between hosts, as a part of the gradients' own.
        overlap: whether gradients leave while backward still runs, among devices or hosts.
        by_speed: whether shares of a batch follow the workers' speed.
        central: whether there is one copy of the parameters, of which each worker updates a slice.
        parts: of how many workers each holds a part of every parameter; 1 where all hold all.
        gathers: how often in a round these parameters are gathered, a unit at a time.
    """

    sent: float = 1.0
    overlap: bool = False
    by_speed: bool = False
    central: bool = False
    parts: int = 1
    gathers: int = 0


@dataclass(frozen=True)
class ServerTerms:
    """How workers speak to servers.

    Attributes:
        policies: who may proceed, and which pushes make a step.
        servers: how many, each with an equal part of the bytes.
        span: steps between two pushes; a lease is so many.
        overlap: whether a worker computes while its push and its pull are under way.
        local: whether it updates its own parameters, too.
        fixed: whether all workers have the same number of leases.
        optimizes: whether servers update parameters by the job's optimizer.
        pushed, pulled: bytes on the wire, as a part of the parameters' own.
        spare: so many workers' gradients are not needed in a round, whose batch is that of the others.
        alone: rounds that worker 0 computes alone before the others begin.
        patience_s: how long a worker waits for an average before it closes the round without those that are late.
        cards: over so many network cards a worker sends: those of the hosts of a replica's ranks, each of which speaks
            to servers of its own.
    """

    policies: tuple[Admission, Combination]
    servers: int
    span: int = 1
    overlap: bool = False
    local: bool = False
    fixed: bool = False
    optimizes: bool = True
    pushed: float = 1.0
    pulled: float = 1.0
    spare: int = 0
    alone: int = 0
    patience_s: float = math.inf
    cards: int = 1


@dataclass(frozen=True)
class ParameterMean:
    """Replicas step on their own, and average their parameters every `period` rounds.

    Attributes:
        post_local: rounds at the beginning after each of which they average.
        sent: bytes on the wire, as a part of the parameters' own.
        through: the servers that average; None for an all-reduce.
    """

    period: int | AutoPeriod
    post_local: int = 0
    sent: float = 1.0
    through: ServerTerms | None = None


@dataclass(frozen=True)
class NeighbourMean:
    """Workers average their parameters with their neighbours' every `period` rounds, and wait for these alone."""

    topology: str
    period: int


@dataclass(frozen=True)
class Stages:
    """A pipeline on so many devices.

    Attributes:
        schedule: the name of the order of passes, of `micro_batches` through `chunks` stages a device.
        recompute: the part of the micro-batches whose forward is done again.
        partition: "auto", or layers a stage.
        cost, limit_bytes: as of the strategy: by what, and within which, "auto" divides.
        slices: devices of each stage, which divide its layers.
    """

    devices: int
    schedule: str
    micro_batches: int
    chunks: int
    recompute: float = 0.0
    partition: str | Sequence[int | Sequence[str]] = "auto"
    cost: str = "time"
    limit_bytes: int | None = None
    slices: int = 1


@dataclass(frozen=True)
class Slices:
    """Each layer is divided over so many devices, which compute the same batch."""

    devices: int


@dataclass(frozen=True)
class RingOfTokens:
    """Each sequence is divided over so many devices, whose keys and values go around among them."""

    devices: int


@dataclass(frozen=True)
class Behaviour:
    """What workers do.

    Attributes:
        experts: over how many workers the experts of a replica are divided, each of which has a share of its own.
        notes: what a simulation leaves out.
        not_simulated: why it cannot be simulated, and the remedy; "" where it can.
        not_rehearsed: why it cannot be trained in virtual time, and the remedy.
    """

    exchange: GradientSum | ParameterMean | NeighbourMean | ServerTerms | None = None
    division: Stages | Slices | RingOfTokens | None = None
    experts: int = 1
    notes: tuple[str, ...] = ()
    not_simulated: str = ""
    not_rehearsed: str = ""

    @property
    def devices(self) -> int:
        """How many hold one replica."""
        if isinstance(self.division, Stages):
            return self.division.devices * self.division.slices
        return self.division.devices if self.division else 1
