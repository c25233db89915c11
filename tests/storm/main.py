"""Runs jobs of every strategy through faults drawn by a seed, and says what is wrong: scripts/storm."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import FrameType

from headrace.spec.events import encode
from storm.checker import problems
from storm.evidence import Evidence
from storm.failing_disk import POSSIBLE
from storm.faults import GROUPS
from storm.hosts import several_hosts
from storm.jobs import OVER_HOSTS, STRATEGIES
from storm.plants import PLANTS
from storm.runner import undisturbed, weather
from storm.schedule import CLOCKED, GROUPED, KINDS, LINKS, MOUNTED, Fault, draw, read, reduce
from storm.tally import tally
from wall_clock import COMPILER

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results" / "storm.jsonl"


def main(arguments: list[str]) -> int:
    """Returns 1 if something is wrong; with a planted fault, if it was not found."""
    parser = argparse.ArgumentParser(prog="scripts/storm", description=__doc__)
    parser.add_argument("hours", type=float, nargs="?", default=0.0, help="0 for one run")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one takes the next")
    parser.add_argument("--faults", type=int, default=4, help="of a run")
    root = os.geteuid() == 0
    known = [*STRATEGIES, *(OVER_HOSTS if root else ())]
    parser.add_argument("--strategies", nargs="*", default=known, choices=known, help="over hosts: needs root")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="all, without those that this machine does not allow")
    parser.add_argument("--replay", nargs="+", type=_fault, metavar="FAULT", help="these faults, as printed: kill@40/7")
    parser.add_argument("--plant", choices=list(PLANTS), help="in what the runs have left")
    parser.add_argument("--no-reduce", action="store_true", help="leaves a schedule that fails as long as it is")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the evidence of a run that fails is kept")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FILE", help="another than results/storm.jsonl"
    )
    parser.add_argument("--tally", action="store_true", help="says what all storms so far have found, and ends")
    given = parser.parse_args(arguments)
    if given.tally:
        print(tally(given.results))
        return 0
    grouped = root and os.access(GROUPS / "pids", os.W_OK)
    missing = {*(() if root else MOUNTED), *(() if grouped else GROUPED), *(() if COMPILER else CLOCKED)}
    missing |= set() if POSSIBLE else {"failing disk"}
    kinds = given.kinds or [kind for kind in KINDS if kind not in missing]
    signal.signal(signal.SIGTERM, _interrupt)
    # A shell lets what it starts in the background ignore it.
    signal.signal(signal.SIGINT, _interrupt)
    with several_hosts() if set(given.strategies) & set(OVER_HOSTS) else nullcontext():
        return _storm(given, kinds)


def _fault(text: str) -> Fault:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _storm(given: argparse.Namespace, kinds: Sequence[str]) -> int:
    expected: dict[str, str] = {}
    until, seed, bad, struck = time.monotonic() + 3600 * given.hours, given.seed, 0, 0
    try:
        while seed == given.seed or time.monotonic() < until:
            strategy = given.strategies[seed % len(given.strategies)]
            if strategy not in expected:
                expected[strategy] = undisturbed(strategy)
            possible = [kind for kind in kinds if kind not in LINKS or strategy in OVER_HOSTS]
            faults = given.replay or draw(seed, given.faults, possible)
            done, wrong = _one(given, seed, strategy, tuple(faults), expected[strategy])
            struck += done
            bad += bool(wrong)
            seed += 1
    except KeyboardInterrupt:
        print(f"interrupted; the run of seed {seed} does not count")
    runs = seed - given.seed
    print(f"{runs} runs, {struck} faults, {bad} runs with something wrong")
    if not given.plant:
        print(tally(given.results))
    return int(bad < runs if given.plant else bad > 0)


def _one(
    given: argparse.Namespace, seed: int, strategy: str, faults: tuple[Fault, ...], expected: str
) -> tuple[int, list[str]]:
    """Does one run, and writes a line about it; returns how many faults struck, and what is wrong."""

    def seen(faults: tuple[Fault, ...]) -> tuple[Evidence, list[str]]:
        evidence = weather(strategy, faults, expected)
        return evidence, problems(PLANTS[given.plant](evidence) if given.plant else evidence)

    began = time.monotonic()
    evidence, wrong = seen(faults)
    done = sum(len(attempt.strikes) for attempt in evidence.attempts)
    row = {"date": date.today().isoformat(), "seed": seed, "strategy": strategy, "faults": list(map(str, faults))}
    row |= {"struck": done, "seconds": round(time.monotonic() - began, 1), "wrong": wrong}
    if wrong and not given.plant:
        if given.keep:
            _keep(given.keep / f"{seed} {strategy}", evidence, wrong)
        if not given.no_reduce:
            row["needed"] = list(map(str, reduce(faults, lambda part: bool(seen(part)[1]))))
    print(json.dumps(row), flush=True)
    if not given.plant:
        given.results.parent.mkdir(exist_ok=True)
        with given.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return done, wrong


def _keep(folder: Path, evidence: Evidence, wrong: list[str]) -> None:
    """Writes what every attempt said, and the events."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wrong").write_text("\n".join(wrong) + "\n")
    (folder / "events.jsonl").write_text("\n".join(map(encode, evidence.events)) + "\n")
    for number, attempt in enumerate(evidence.attempts):
        told = f"{[str(strike) for strike in attempt.strikes]}\ncode {attempt.code}, ended at {attempt.ended}\n"
        (folder / f"attempt-{number}").write_text(f"{told}left: {attempt.processes} {attempt.files}\n{attempt.said}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
