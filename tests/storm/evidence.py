"""What a run through a storm has left: all that the checker sees."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.spec.events import Event
from storm.schedule import Fault

__all__ = ["Attempt", "Evidence", "Strike"]


@dataclass(frozen=True)
class Strike:
    """A fault that was done: to which ranks, none for the command or the disk; `at` is of the monotonic clock."""

    fault: Fault
    ranks: tuple[int, ...]
    at: float


@dataclass(frozen=True)
class Attempt:
    """The command, once: with what faults, and how it ended.

    Attributes:
        code: its exit code, negative for a signal.
        ended: when; infinite where it had to be killed because it stood still.
        said: what it wrote to standard error.
        processes, files: what was still there afterwards, of the processes, and in /dev/shm and the temporary folder.
    """

    strikes: tuple[Strike, ...]
    code: int
    ended: float
    said: str
    processes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """All attempts of one run, their events, the final parameters, and those of the run without faults.

    Attributes:
        unfinished: checkpoints that are half written or half deleted.
    """

    strategy: str
    attempts: tuple[Attempt, ...]
    events: tuple[Event, ...]
    parameters: str
    undisturbed: str
    unfinished: tuple[str, ...] = ()
