"""Runs jobs of every strategy through faults drawn by a seed, and says what is wrong: scripts/storm."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from storm.checker import problems
from storm.faults import GROUPS
from storm.hosts import several_hosts
from storm.jobs import OVER_HOSTS, STRATEGIES
from storm.plants import PLANTS
from storm.runner import undisturbed, weather
from storm.schedule import GROUPED, KINDS, LINKS, MOUNTED, Fault, draw, reduce

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results" / "storm.jsonl"


def main(arguments: list[str]) -> int:
    """Returns 1 if something is wrong; with a planted fault, if it was not found."""
    parser = argparse.ArgumentParser(prog="scripts/storm", description=__doc__)
    parser.add_argument("hours", type=float, help="0 for one run")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one takes the next")
    parser.add_argument("--faults", type=int, default=4, help="of a run")
    root = os.geteuid() == 0
    known = [*STRATEGIES, *(OVER_HOSTS if root else ())]
    parser.add_argument("--strategies", nargs="*", default=known, choices=known, help="over hosts: needs root")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="all, without those that need root where it is not")
    parser.add_argument("--plant", choices=list(PLANTS), help="in what the runs have left")
    parser.add_argument("--no-reduce", action="store_true", help="leaves a schedule that fails as long as it is")
    given = parser.parse_args(arguments)
    grouped = root and os.access(GROUPS / "pids", os.W_OK)
    missing = {*(() if root else MOUNTED), *(() if grouped else GROUPED)}
    kinds = given.kinds or [kind for kind in KINDS if kind not in missing]
    with several_hosts() if set(given.strategies) & set(OVER_HOSTS) else nullcontext():
        return _storm(given, kinds)


def _storm(given: argparse.Namespace, kinds: Sequence[str]) -> int:
    expected: dict[str, str] = {}
    until, seed, bad, struck = time.monotonic() + 3600 * given.hours, given.seed, 0, 0
    while seed == given.seed or time.monotonic() < until:
        strategy = given.strategies[seed % len(given.strategies)]
        if strategy not in expected:
            expected[strategy] = undisturbed(strategy)
        possible = [kind for kind in kinds if kind not in LINKS or strategy in OVER_HOSTS]
        faults = draw(seed, given.faults, possible)

        def found(faults: tuple[Fault, ...], strategy: str = strategy) -> tuple[list[str], int]:
            evidence = weather(strategy, faults, expected[strategy])
            done = sum(len(attempt.strikes) for attempt in evidence.attempts)
            return problems(PLANTS[given.plant](evidence) if given.plant else evidence), done

        wrong, done = found(faults)
        struck += done
        if wrong and not given.no_reduce and not given.plant:
            faults = reduce(faults, lambda part: bool(found(part)[0]))
        bad += bool(wrong)
        row = {"seed": seed, "strategy": strategy, "faults": [str(fault) for fault in faults], "struck": done}
        print(json.dumps({**row, "wrong": wrong}), flush=True)
        if not given.plant:
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps({**row, "wrong": wrong}) + "\n")
        seed += 1
    runs = seed - given.seed
    print(f"{runs} runs, {struck} faults, {bad} runs with something wrong")
    return int(bad < runs if given.plant else bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
