"""Whether another process of this host still lives and moves."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

# Above the time from look to look, and together with that from beat to beat (0.25 s) below the least timeout.
_GAP_S = 0.5


class LivenessProbe:
    """Watches one process for signs of life: its beat, or any processor time.

    A step may take as long as it takes: while the process computes it uses processor time, while it sleeps its
    beat goes on. A stopped process (SIGSTOP, a debugger, a dead disk) does neither.

    Args:
        pid: the process; 0 for one that has not said who it is, and gives no sign of life before.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._stat = Path(f"/proc/{pid}/stat")
        self._seen: tuple[int, int] = (-1, -1)
        self._silent_s = 0.0
        self._looked = monotonic()

    def silent_s(self, beat: int) -> float:
        """Looks, and returns for how many seconds there was no sign of life.

        Args:
            beat: a counter that a thread of the process adds to a few times a second.
        """
        now = monotonic()
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
