"""Events of the run itself, most of them written by the launcher, and what every event has."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

LAUNCHER = -1
"""The rank of the process that started the run."""


@dataclass(frozen=True)
class Event(ABC):
    """Attributes:
    rank: who says so; `LAUNCHER` for the process that started the run.
    time_s: seconds since the run began.
    """

    kind: ClassVar[str] = "event"
    rank: int
    time_s: float


@dataclass(frozen=True)
class RunStarted(Event):
    """By the launcher, first.

    Attributes:
        strategy: the registered name.
        workers: how many compute.
        device: "cpu" or "cuda".
        threads: threads a worker.
        global_batch_size: examples a round.
        examples_per_epoch: length of the training set.
        started_at: wall time, ISO 8601, for display only.
        plan: the plan as JSON values.
        versions: "headrace", "torch", "python" to version.
        clock_s: the run's begin on the host's monotonic clock.
        resumed_step: rounds that an earlier attempt had done; what it did beyond them is done again. The events of
            all attempts follow each other in the same files, on one clock.
        resumed_leases: of the rounds beyond them, from each to before another: those that were done as well.
    """

    kind: ClassVar[str] = "run_started"
    strategy: str
    workers: int
    device: str
    threads: int
    global_batch_size: int
    examples_per_epoch: int
    started_at: str
    plan: Mapping[str, object]
    versions: Mapping[str, str]
    clock_s: float = 0.0
    resumed_step: int = 0
    resumed_leases: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Notice(Event):
    """A line for the user."""

    kind: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True)
class Failed(Event):
    """A worker's error, or what the launcher knows of a process that is gone.

    Attributes:
        step: the one it was in.
        cause: one line.
        traceback: the worker's own, from the first frame of the user's code on.
        exit_code: what the command line ends with.
    """

    kind: ClassVar[str] = "failed"
    step: int
    cause: str
    traceback: str = field(default="", repr=False)
    exit_code: int = 1


@dataclass(frozen=True)
class Lost(Event):
    """By the launcher: a process is gone, and the run goes on.

    Attributes:
        lost: its rank.
        incarnation: how many there were in its place before.
        cause: one line.
        replaced: whether another one is started in its place.
    """

    kind: ClassVar[str] = "lost"
    lost: int
    incarnation: int
    cause: str
    replaced: bool

    @property
    def line(self) -> str:
        """What happened, for people."""
        then = "another one takes its place" if self.replaced else "the others go on without it"
        return f"rank {self.lost} was lost ({self.cause}): {then}"


@dataclass(frozen=True)
class RunEnded(Event):
    """By the launcher, last.

    Attributes:
        status: "ok", "failed" or "interrupted".
    """

    kind: ClassVar[str] = "run_ended"
    status: str
