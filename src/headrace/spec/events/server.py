"""Events that parameter servers write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from headrace.spec.events.run import Event


@dataclass(frozen=True)
class ServerStarted(Event):
    """A server has loaded its shards."""

    kind: ClassVar[str] = "server_started"
    host: str
    pid: int
    shards: int
    parameter_bytes: int


@dataclass(frozen=True)
class ShardStats:
    """What a server has done with one shard.

    Attributes:
        name: the parameter's; for a part of a parameter with its first element, "weight@4096".
        bytes: of its parameters.
        pushes, pulls: gradients received, and parameters sent.
        steps: updates.
        apply_s: seconds that the updates took.
        pushed_bytes, pulled_bytes: bytes received and sent.
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
    """What a server has done since it started: about once a second, and at its end.

    Attributes:
        busy_s: seconds in which it was not waiting for messages.
        queue_mean, queue_longest: number of messages that it found waiting.
        staleness: worker (its rank, or "-1" for the mean of a round) to staleness to the number of shards' updates.
        waited_s: worker to the seconds from its requests to their answers.
        refused: reason to the number of shards' pushes.
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
    """A server without a backup has written its whole state, between two updates, to the disk.

    Attributes:
        bytes: of the file.
        pause_s: how long the server answered no request, for the copy.
    """

    kind: ClassVar[str] = "snapshot_taken"
    bytes: int
    pause_s: float


@dataclass(frozen=True)
class ServerEnded(Event):
    """The last event of a server.

    Attributes:
        moved_bytes: payload that was pushed to it and pulled from it.
        peak_memory_bytes: largest resident size of its process.
        parameter_bytes, optimizer_bytes: bytes that it holds.
    """

    kind: ClassVar[str] = "server_ended"
    moved_bytes: int
    peak_memory_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
