"""What happens in a simulation: the steps of all workers, as columns, and the passes of some steps of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headrace.prediction.simulation.scene import Seconds
from headrace.spec.events import ParametersAveraged


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
    averaged: tuple[ParametersAveraged, ...] = ()
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

    def rows(self) -> Iterator[tuple[int, int, float, float, float, float]]:
        """Yields of each step the worker, its number, when it ends, and what computing, exchange and update take."""
        columns = (self.worker, self.step, self.ended_s, self.compute_s, self.exchange_s, self.update_s)
        return zip(*(column.tolist() for column in columns), strict=True)


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


def one_after_another(parts: Sequence[Timeline]) -> Timeline:
    """Returns the timeline of parts that all workers begin together, each when the one before has ended."""
    seconds = np.array([part.seconds for part in parts])
    rounds = np.array([len(part.step) / part.workers if part.rounds is None else part.rounds for part in parts])
    begins = np.cumsum(seconds) - seconds
    first = np.cumsum([0, *(int(part.step.max()) + 1 for part in parts)])
    staleness: Counter[int] = Counter()
    for part in parts:
        staleness.update(part.staleness)
    return Timeline(
        worker=np.concatenate([part.worker for part in parts]),
        step=np.concatenate([part.step + before for part, before in zip(parts, first, strict=False)]),
        ended_s=np.concatenate([part.ended_s + began for part, began in zip(parts, begins, strict=True)]),
        compute_s=np.concatenate([part.compute_s for part in parts]),
        exchange_s=np.concatenate([part.exchange_s for part in parts]),
        update_s=np.concatenate([part.update_s for part in parts]),
        busy_s=np.sum([part.busy_s for part in parts], axis=0),
        moved_bytes=float(np.average([part.moved_bytes for part in parts], weights=rounds)),
        server_busy={
            name: float(np.average([part.server_busy[name] for part in parts], weights=seconds))
            for name in parts[0].server_busy
        },
        staleness=dict(sorted(staleness.items())),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        rounds=float(rounds.sum()),
    )
