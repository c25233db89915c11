"""From kill -9 of a primary server to the next acknowledged push, in real runs. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import headrace as hr
from headrace.spec.events import Event, Lost, RunStarted, ServerStarted, Stepped

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import endless

WORKERS = 2
SERVERS = (WORKERS, WORKERS + 1)
SETTLED_S = 1.0
"""A backup that has begun holds everything by then."""


class Killer:
    """Kills the primary repeatedly, and records when."""

    def __init__(self, kills: int) -> None:
        self.killed: list[float] = []
        self._kills = kills
        self._pids: dict[int, int] = {}
        self._primary = SERVERS[0]
        self._clock = 0.0
        self._since = float("inf")

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._clock = event.clock_s
        elif isinstance(event, ServerStarted):
            self._pids[event.rank] = event.pid
            if len(self._pids) == len(SERVERS):
                self._since = time.monotonic()
        elif isinstance(event, Stepped) and time.monotonic() - self._since > SETTLED_S:
            self._kill()

    def _kill(self) -> None:
        if len(self.killed) == self._kills:
            os.kill(os.getpid(), signal.SIGINT)
            self._since = float("inf")
            return
        self._since = float("inf")
        self.killed.append(time.monotonic() - self._clock)
        os.kill(self._pids.pop(self._primary), signal.SIGKILL)
        self._primary = next(server for server in SERVERS if server != self._primary)


def failovers(transport: str, kills: int) -> list[float]:
    """Returns the seconds from each kill to the next push that the new primary has acknowledged."""
    killer = Killer(kills)
    strategy = hr.ParameterServer(WORKERS, backups=1, transport=transport)
    run = hr.fit(endless(), strategy, on_event=killer)
    steps = sorted(event.time_s for event in run.events if isinstance(event, Stepped))
    # The primary is gone when the launcher says so; whatever is acknowledged later, its backup has.
    lost = sorted(event.time_s for event in run.events if isinstance(event, Lost))
    assert len(lost) == kills, f"{len(lost)} of {kills} kills were noticed"
    return [
        next(step for step in steps if step > noticed) - killed
        for killed, noticed in zip(killer.killed, lost, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    kills = parser.parse_args().kills
    # A shell lets what it starts in the background ignore the signal by which the run is ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = {}
    for transport in ("shared_memory", "tcp"):
        seconds = sorted(failovers(transport, kills))
        rows[transport] = {
            "kills": kills,
            "median_s": statistics.median(seconds),
            "p99_s": seconds[min(kills - 1, int(0.99 * kills))],
            "longest_s": seconds[-1],
        }
        print(transport, json.dumps(rows[transport]), file=sys.stderr, flush=True)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "failover.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
