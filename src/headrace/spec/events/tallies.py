"""What events count, one of these for each of several things."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputStageStats:
    """What one stage of a worker's input has cost, in all threads or processes together.

    Attributes:
        name: "source", "map(augment)", "batch".
        busy_s: seconds in it.
        waiting_s: of those, in which it did not compute: it waited for a disk, a network, a lock or a core.
    """

    name: str
    busy_s: float
    waiting_s: float


@dataclass(frozen=True)
class ShardStats:
    """What a server has done with one shard.

    Attributes:
        name: the parameter's; of a piece of one, with its first element, "weight@4096".
        bytes: of its parameters.
        pushes, pulls: gradients that came, and parameters that were given.
        steps: updates.
        apply_s: seconds that the updates took.
        pushed_bytes, pulled_bytes: what moved.
    """

    name: str
    bytes: int
    pushes: int
    pulls: int
    steps: int
    apply_s: float
    pushed_bytes: int
    pulled_bytes: int
