"""Whether there is room for what a run tells."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

_LOOK_EVERY_S = 1.0


class DiskMonitor:
    """Says when a run's disk is full: the run's own notices of that wait for room on it.

    Args:
        run_dir: of the run.
        say: takes a line.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], object]) -> None:
        self._run_dir = run_dir
        self._say = say
        self._full = False
        self._looked = monotonic()

    def look(self) -> None:
        """Looks once a second, however often it is called."""
        if monotonic() < self._looked + _LOOK_EVERY_S:
            return
        self._looked = monotonic()
        found = os.statvfs(self._run_dir)
        full = not (found.f_bavail if os.geteuid() else found.f_bfree)
        if full and not self._full:
            self._say(
                f"the disk of {self._run_dir} is full: training goes on, without new checkpoints; events and notices "
                "wait until there is room"
            )
        elif self._full and not full:
            self._say(f"the disk of {self._run_dir} has room again: {found.f_bavail * found.f_frsize:,} bytes")
        self._full = full
