"""Runs the tests about faults again and again on a busy machine, and says which failed: scripts/repeat-faults."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from fault_suite.files import FILES

__all__ = ["failed", "main", "tally"]

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "fault_suite.jsonl"
BUSY = "while True: pass"


def main(arguments: list[str]) -> int:
    """Returns 1 if a repetition failed."""
    parser = argparse.ArgumentParser(prog="scripts/repeat-faults", description=__doc__)
    parser.add_argument("times", type=int, nargs="?", default=1)
    parser.add_argument("--first", type=int, default=1, help="number of the first one, which is its hash seed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begins none later than this")
    parser.add_argument("--busy", type=int, default=2, help="processes beside it that only compute")
    parser.add_argument("--at-once", type=int, default=2, help="tests side by side")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "faults", help="where the output is kept")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--tally", action="store_true", help="says what all repetitions so far have found, and ends")
    parser.add_argument("tests", nargs="*", help="instead of all files; for pytest")
    given = parser.parse_args(arguments)
    if given.tally:
        print(tally(given.results))
        return 0
    given.logs.mkdir(parents=True, exist_ok=True)
    until, bad = time.monotonic() + 60 * given.minutes, 0
    with _busy(given.busy):
        for number in range(given.first, given.first + given.times):
            if time.monotonic() > until:
                break
            bad += _repeat(given, number)
    print(tally(given.results))
    return int(bad > 0)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keeps some cores busy meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _repeat(given: argparse.Namespace, number: int) -> bool:
    """Runs the tests once, and writes a line about it; returns whether it failed."""
    command = [sys.executable, "-m", "pytest", "-n", str(given.at_once), "--dist", "worksteal"]
    log = given.logs / f"{number}.txt"
    began = time.monotonic()
    with log.open("w") as output:
        environment = {**os.environ, "PYTHONHASHSEED": str(number)}
        code = subprocess.run(
            [*command, *(given.tests or FILES)], cwd=ROOT, env=environment, stdout=output, stderr=output, check=False
        ).returncode
    seconds, said = time.monotonic() - began, log.read_text()
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error|skipped)", said[-400:])}
    row = {"date": date.today().isoformat(), "number": number, "seconds": round(seconds, 1), "code": code, **counts}
    row |= {"load": round(os.getloadavg()[1], 1), "failures": failed(said), "all": not given.tests}
    print(json.dumps(row), flush=True)
    given.results.parent.mkdir(exist_ok=True)
    with given.results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    if code:
        print(f"repetition {number}, PYTHONHASHSEED={number}: {log}", flush=True)
    return code != 0


def failed(said: str) -> list[str]:
    """Returns the tests that failed, from pytest's summary."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+?\[.*?\]|[^\s\[]+)(?= - |$)", said, flags=re.MULTILINE)


def tally(path: Path) -> str:
    """Returns a line about all repetitions of the whole suite in a file, and one for each test that failed."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if row["all"]]
    hours, bad = sum(row["seconds"] for row in rows) / 3600, sum(row["code"] != 0 for row in rows)
    lines = [f"{path.name}: {len(rows)} repetitions, {hours:.2f} hours, {bad} with a failure"]
    lines += [f"  {row['date']}, repetition {row['number']}: {each}" for row in rows for each in row["failures"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
