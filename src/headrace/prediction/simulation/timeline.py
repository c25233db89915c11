"""What happens in a simulation: the steps of all workers, as columns, and the passes of some steps of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headrace.prediction.simulation.scene import Seconds


@dataclass(frozen=True)
class Passes:
    """The passes of a rank of the first replica in one step, in order; `in_flight` micro-batches at most at a time."""

    step: int
    rank: int
    in_flight: int
    stages: tuple[int, ...]
    micro_batches: tuple[int, ...]
    kinds: tuple[str, ...]
    began_s: tuple[float, ...]
    ended_s: tuple[float, ...]


@dataclass(frozen=True)
class Timeline:
    """One row a step of a worker, in any order.

    Attributes:
        busy_s: of each worker: computing, all its steps together. The rest of the time it waits.
        moved_bytes: that a worker sends or receives in a step, on average.
        server_busy: the part of the time in which a server's card, or its core, is busy; the busier of both.
        staleness: of updates, and how many updates had it.
        notes: what a reader must know.
        rounds: how many global batches the steps that count make; None where all steps count.
    """

    worker: NDArray[np.int64]
    step: NDArray[np.int64]
    ended_s: Seconds
    compute_s: Seconds
    exchange_s: Seconds
    update_s: Seconds
    busy_s: Seconds
    moved_bytes: float = 0.0
    server_busy: Mapping[str, float] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    passes: tuple[Passes, ...] = ()
    averaged: tuple[tuple[int, float, float], ...] = ()
    notes: tuple[str, ...] = ()
    rounds: float | None = None

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.busy_s)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step."""
        return float(self.ended_s.max())


def on_devices(timeline: Timeline, devices: int) -> Timeline:
    """Returns the timeline of replicas, each of which so many devices hold that all do what it does."""
    first = timeline.worker * devices
    return replace(
        timeline,
        worker=np.concatenate([first + device for device in range(devices)]),
        step=np.tile(timeline.step, devices),
        ended_s=np.tile(timeline.ended_s, devices),
        compute_s=np.tile(timeline.compute_s, devices),
        exchange_s=np.tile(timeline.exchange_s, devices),
        update_s=np.tile(timeline.update_s, devices),
        busy_s=np.repeat(timeline.busy_s, devices),
    )


def of_rounds(
    ended_s: Seconds, compute_s: Seconds, exchange_s: Seconds, update_s: Seconds, busy_s: Seconds | None = None
) -> Timeline:
    """Returns the timeline of arrays of the shape (rounds, workers)."""
    rounds, workers = ended_s.shape
    return Timeline(
        worker=np.tile(np.arange(workers), rounds),
        step=np.repeat(np.arange(rounds), workers),
        ended_s=ended_s.ravel(),
        compute_s=compute_s.ravel(),
        exchange_s=exchange_s.ravel(),
        update_s=update_s.ravel(),
        busy_s=(compute_s + update_s).sum(axis=0) if busy_s is None else busy_s,
    )
