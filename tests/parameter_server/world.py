"""What may happen in a history of workers, shards and leases in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.policies.staleness import Admission, Combination, EveryPush, Unbounded


@dataclass(frozen=True)
class World:
    """What may happen in a history.

    Attributes:
        seed: of everything random.
        paces: how long a step takes, by worker.
        admission, combination: of every shard.
        shards: how many.
        portions: of a round.
        fences: rounds in front of each.
        fixed: as `Leases` takes it.
        latency: the longest way of a message.
        empty: share of leases without data.
        sick: share of gradients that are not finite.
        deaths: how many workers are lost.
        forever: whether they stay away.
        halts: how often a worker asks for an early sync point.
        eager: pull with the push, not before the next step.
        rests, ahead: whether a worker without a portion leaves until it has one; shards know how many leases come.
        arbiter: whether one more machine says first which gradients make a round, by claims of no content.
        patience: how long a worker that has pushed waits for the others before the round is to end without them.
    """

    seed: int
    paces: tuple[float, ...]
    admission: Admission = field(default_factory=Unbounded)
    combination: Combination = field(default_factory=EveryPush)
    shards: int = 1
    portions: int = 1
    fences: tuple[int, ...] = (3,)
    fixed: bool = False
    latency: float = 0.5
    empty: float = 0.0
    sick: float = 0.0
    deaths: int = 0
    forever: bool = False
    halts: int = 0
    eager: bool = False
    rests: bool = False
    ahead: bool = True
    arbiter: bool = False
    patience: float = math.inf
