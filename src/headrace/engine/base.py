"""What engines share: their interface, how far a run is, and whether a process still lives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from headrace.worker.run_spec import RunSpec

if TYPE_CHECKING:
    # For the type alone: it imports torch, and an engine starts before that.
    from headrace.shared_memory.control_page import ControlPage

# Above the time from look to look, and together with that from beat to beat (0.25 s) below the least timeout.
_GAP_S = 0.5


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    Attributes:
        loss: the last of the first rank that has one; 0 before there is one.
    """

    step: int
    loss: float
    examples: int

    @classmethod
    def read(cls, page: ControlPage) -> RunProgress:
        """Returns the progress that the ranks' heartbeats tell."""
        heartbeats = [record.heartbeat for record in page.ranks]
        loss = next((heartbeat.loss for heartbeat in heartbeats if heartbeat.loss), 0.0)
        return cls(max(each.step for each in heartbeats), loss, sum(each.examples for each in heartbeats))


class Engine(ABC):
    """Starts the processes of a run and watches them."""

    @abstractmethod
    def run(self, order: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        """Runs to the end; returns "ok" or "interrupted".

        Args:
            progress: called a few times a second in the caller's thread.

        Raises:
            WorkerFailed: a worker raised; the first that did.
            PeerLost: a worker was killed, or froze.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every process of this engine."""


class LivenessProbe:
    """Watches one process for signs of life: its beat, or any processor time.

    A step may take as long as it takes: while the process computes it uses processor time, while it sleeps its
    beat goes on. A stopped process (SIGSTOP, a debugger, a dead disk) does neither.

    Args:
        pid: the process; 0 for one that has not told its id, and gives no sign of life before.
        clock: returns seconds.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = monotonic) -> None:
        self.pid = pid
        self._clock = clock
        self._stat = Path(f"/proc/{pid}/stat")
        self._seen: tuple[int, int] = (-1, -1)
        self._silent_s = 0.0
        self._looked = clock()

    def silent_s(self, beat: int) -> float:
        """Looks, and returns for how many seconds there was no sign of life.

        Args:
            beat: a counter that a thread of the process adds to a few times a second.
        """
        now = self._clock()
        # If it is the watcher that stood still (a suspended laptop), it cannot accuse the watched.
        passed = min(now - self._looked, _GAP_S)
        self._looked = now
        seen = (beat, self._processor_time())
        self._silent_s = self._silent_s + passed if seen == self._seen else 0.0
        self._seen = seen
        return self._silent_s

    def is_stopped(self) -> bool:
        """Whether the process is held by SIGSTOP or a debugger."""
        fields = self._fields()
        return bool(fields) and fields[0] in ("T", "t")

    def is_gone(self) -> bool:
        """Whether the process does not exist any more, or is a zombie."""
        fields = self._fields()
        return not fields or fields[0] in ("Z", "X")

    def _processor_time(self) -> int:
        fields = self._fields()
        return int(fields[11]) + int(fields[12]) if fields else -1

    def _fields(self) -> list[str]:
        try:
            # The name of the program, in brackets, may hold anything.
            return self._stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return []
