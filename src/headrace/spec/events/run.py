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
    """What every event has.

    Attributes:
        rank: the process that wrote it; `LAUNCHER` for the process that started the run.
        time_s: seconds since the run began.
    """

    kind: ClassVar[str] = "event"
    rank: int
    time_s: float


@dataclass(frozen=True)
class RunStarted(Event):
    """The first event, by the launcher.

    Attributes:
        strategy: the registered name.
        workers: number of processes that compute.
        device: "cpu" or "cuda".
        threads: threads of each worker.
        global_batch_size: examples in a round.
        examples_per_epoch: length of the training set.
        started_at: wall time, ISO 8601, for display only.
        plan: the plan as JSON values.
        versions: "headrace", "torch", "python" to version.
        clock_s: start of the run on the host's monotonic clock.
        resumed_step: rounds that an earlier attempt had done; later rounds of that attempt are repeated. The events of
            all attempts follow each other in the same files, on one clock.
        resumed_leases: half-open ranges of data leases beyond `resumed_step` that are not repeated.
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
    """A worker's error, or what the launcher knows of a process that has ended.

    Attributes:
        step: the step in which it happened.
        cause: one line.
        traceback: the worker's own, from the first frame of the user's code on.
        exit_code: exit code of the command line.
    """

    kind: ClassVar[str] = "failed"
    step: int
    cause: str
    traceback: str = field(default="", repr=False)
    exit_code: int = 1


@dataclass(frozen=True)
class Lost(Event):
    """By the launcher: a process has ended, and the run continues.

    Attributes:
        lost: its rank.
        incarnation: number of earlier processes with this rank.
        cause: one line.
        replaced: whether the launcher starts a replacement.
    """

    kind: ClassVar[str] = "lost"
    lost: int
    incarnation: int
    cause: str
    replaced: bool

    @property
    def line(self) -> str:
        """What happened, as a sentence for the user."""
        then = "another one takes its place" if self.replaced else "the others go on without it"
        return f"rank {self.lost} was lost ({self.cause}): {then}"


@dataclass(frozen=True)
class RunEnded(Event):
    """The last event, by the launcher.

    Attributes:
        status: "ok", "failed" or "interrupted".
    """

    kind: ClassVar[str] = "run_ended"
    status: str
