"""When and how runs are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cases import GO_ON

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from processes import below, rank_of, workers

from headrace.spec.events import Event, Stepped

LAUNCHER_IN = 20
MOST_LAUNCHERS = 3
MOST_KILLS = 4
MOST_KILLS_COUNTED = 10
"""Kills of one run at most, where kills are counted and not trials."""
MOST_ROUNDS_BEFORE = 12
"""Rounds that are done at most before such a kill, so that many come before the end."""


@dataclass(frozen=True)
class Plan:
    """When and how often runs are killed.

    Attributes:
        trials: of each row.
        kills: of each row, in as many trials as it takes; 0 counts trials.
        dice: from which moments and victims come.
    """

    trials: int
    kills: int
    dice: random.Random

    @property
    def most_kills(self) -> int:
        """Of one run."""
        return MOST_KILLS_COUNTED if self.kills else MOST_KILLS

    def launchers(self, strategy: str) -> int:
        """Returns how often a run's launcher is killed: always where a run goes on without a worker."""
        if strategy in GO_ON:
            return self.dice.randint(1, MOST_LAUNCHERS)
        return int(self.dice.randrange(LAUNCHER_IN) == 0)

    def workers(self, strategy: str) -> int:
        """Returns how often a worker of a run is killed."""
        return 0 if strategy in GO_ON else self.dice.randint(1, self.most_kills)

    def moment(self, length_s: float, was_late: bool) -> Moment:
        """Returns when a worker is killed in a run of this length; by the time alone after one that came too late."""
        if self.kills and not was_late and self.dice.randrange(4):
            return Moment(self.dice.uniform(0, 0.05), self.dice.randint(1, MOST_ROUNDS_BEFORE))
        return Moment(self.dice.uniform(0.02, 0.5 if self.kills else 1.0) * length_s)


class Moment:
    """So long after a run's workers have appeared and some rounds are done."""

    def __init__(self, after_s: float, rounds: int = 0) -> None:
        self.after_s = after_s
        self.rounds_done = threading.Event()
        self._rounds = rounds
        if not rounds:
            self.rounds_done.set()

    def see(self, event: Event) -> None:
        """Is called with each event of the run."""
        self._rounds -= isinstance(event, Stepped) and event.rank == 0
        if self._rounds <= 0:
            self.rounds_done.set()


@contextmanager
def struck(dice: random.Random, moment: Moment) -> Iterator[None]:
    """Kills a random worker at a moment of the run."""
    over = threading.Event()
    which = dice.random()

    def strike() -> None:
        while not (found := workers()):
            if over.wait(0.001):
                return
        while not moment.rounds_done.wait(0.001):
            if over.is_set():
                return
        if over.wait(moment.after_s):
            return
        alive = [pid for pid in workers() if rank_of(pid) is not None] or found
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(alive[int(which * len(alive))], signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def kill_launcher(command: Sequence[str], run_dir: Path, moment_s: float) -> None:
    """Runs a command that trains, and kills it with all its processes, `moment_s` after its first event."""
    events = run_dir / "events" / "rank-0.jsonl"
    before = events.stat().st_size if events.exists() else 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not events.exists() or events.stat().st_size == before):
        time.sleep(0.001)
    time.sleep(moment_s)
    children = below(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child.pid}").exists() for child in children):
        if time.monotonic() > deadline:
            raise RuntimeError("the workers have outlived their launcher")
        time.sleep(0.005)
