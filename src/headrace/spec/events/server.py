"""Events that parameter servers write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from headrace.spec.events.run import Event


@dataclass(frozen=True)
class ServerStarted(Event):
    """By a server, when it holds its shards."""

    kind: ClassVar[str] = "server_started"
    host: str
    pid: int
    shards: int
    parameter_bytes: int


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


@dataclass(frozen=True)
class ServerStats(Event):
    """By a server, about once a second and at its end: what it has done since it began.

    Attributes:
        busy_s: seconds in which it was not waiting for messages.
        queue_mean, queue_longest: messages that were there when it looked.
        staleness: worker (its rank, or "-1" where a round's mean was applied) to staleness to how many shards' updates.
        waited_s: worker to the seconds that its requests took until they were answered.
        refused: reason to how many shards' pushes.
        shards: in the server's order.
    """

    kind: ClassVar[str] = "served"
    busy_s: float
    queue_mean: float
    queue_longest: int
    staleness: Mapping[str, Mapping[str, int]]
    waited_s: Mapping[str, float]
    refused: Mapping[str, int]
    shards: tuple[ShardStats, ...]


@dataclass(frozen=True)
class SnapshotTaken(Event):
    """By a server without a backup, when all that it is, between two updates, is on the disk.

    Attributes:
        bytes: of the file.
        pause_s: how long the server answered nobody, for the copy.
    """

    kind: ClassVar[str] = "snapshot_taken"
    bytes: int
    pause_s: float


@dataclass(frozen=True)
class ServerEnded(Event):
    """By a server, last.

    Attributes:
        moved_bytes: payload that was pushed to it and pulled from it.
        peak_memory_bytes: largest resident size of its process.
        parameter_bytes, optimizer_bytes: what it holds.
    """

    kind: ClassVar[str] = "server_ended"
    moved_bytes: int
    peak_memory_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
