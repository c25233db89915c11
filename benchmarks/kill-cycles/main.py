"""Kills process after process of one run, and counts what is left of them. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import Event, ServerStarted, Stepped, WorkerStarted

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import endless

WORKERS, SERVERS = 2, 1
RANKS = WORKERS + 2 * SERVERS
WINDOW = 20
"""Cycles that are looked at, the first and the last of them."""
SETTLED_S = 0.5
"""A backup that has begun holds everything by then."""


def belongings() -> dict[str, int]:
    """Counts what this process and those below it hold."""
    pids = [os.getpid(), *_below(os.getpid())]
    return {
        "descriptors here": len(os.listdir("/proc/self/fd")),
        "descriptors below": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids[1:]),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        "processes": len(pids),
        "zombies": sum(_state(pid) == "Z" for pid in pids),
        "segments": len({name for pid in pids for name in _segments(pid)}),
        "in /dev/shm": len(os.listdir("/dev/shm")),
    }


def most(counts: list[dict[str, int]]) -> dict[str, int]:
    """Returns the largest number of each: a server that began as a backup has a segment more than one that did not."""
    return {what: max(count[what] for count in counts) for what in counts[0]}


def _below(pid: int) -> list[int]:
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [one for child in children for one in (child, *_below(child))]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _segments(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [f"{line.split()[4]}{line.split()[5]}" for line in lines if "/memfd:headrace" in line]


class Killer:
    """Kills one process after the other, each when all have been there for a while."""

    def __init__(self, kills: int) -> None:
        self.killed: dict[int, int] = dict.fromkeys(range(RANKS), 0)
        self.counts: list[dict[str, int]] = []
        self._left = kills
        self._chance = random.Random(0)
        self._pids: dict[int, int] = {}
        self._since = float("inf")

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerStarted | ServerStarted):
            self._pids[event.rank] = event.pid
            if len(self._pids) == RANKS:
                self._since = time.monotonic()
        elif isinstance(event, Stepped) and time.monotonic() - self._since > SETTLED_S:
            self._since = float("inf")
            if sum(self.killed.values()) >= RANKS:
                # Every place has been taken by another process once.
                self.counts.append(belongings())
            if not self._left:
                os.kill(os.getpid(), signal.SIGINT)
                return
            self._left -= 1
            done = sum(self.killed.values())
            rank = done if done < RANKS else self._chance.randrange(RANKS)
            self.killed[rank] += 1
            os.kill(self._pids.pop(rank), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    kills = parser.parse_args().kills
    # A shell lets what it starts in the background ignore the signal by which the run is ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    killer = Killer(kills)
    with LocalEngine() as engine:
        hr.fit(endless(), hr.ParameterServer(WORKERS, servers=SERVERS, backups=1), engine=engine, on_event=killer)
    names = ("worker", "worker", "server", "server")
    row = {
        "kills": kills,
        "by role": {name: sum(n for rank, n in killer.killed.items() if names[rank] == name) for name in names},
        "most of the first cycles": most(killer.counts[:WINDOW]),
        "most of the last cycles": most(killer.counts[-WINDOW:]),
        "threads of this process in the end": threading.active_count(),
    }
    print(json.dumps(row, indent=2), file=sys.stderr)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "kill-cycles.json").write_text(json.dumps(row, indent=2) + "\n")
    first, last = most(killer.counts[:WINDOW]), most(killer.counts[-WINDOW:])
    grown = {what: n for what, n in last.items() if n > first[what]}
    sys.exit(f"more than at the start: {grown}" if grown else 0)


if __name__ == "__main__":
    main()
