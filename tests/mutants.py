"""Plants known faults in copies of the tree, one at a time: the tests that are named beside each must find it.

A line for each fault: the first test that failed, NOT FOUND, or stale where its text is no longer in the file exactly
once. All of these tests run on a copy without a fault first, so that what fails then is not taken for a find.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = (ROOT / "tests" / "mutants.toml", ROOT / "benchmarks" / "verify-faults" / "faults.toml")
"""The second one's faults `headrace verify` must find, too."""
FOLDERS = ("src", "tests", "examples", "docs", "benchmarks")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "pyproject.toml")
IMPORTED = ("torch", "torch.nn.attention", "numpy", "pytest", "typer", "cloudpickle")
"""What every test imports besides headrace: each process that runs tests is forked with it."""
OPTIONS = ("-q", "-rfE", "-p", "no:cacheprovider", "--timeout", "60", "--cold")
TIMEOUT_S = 300.0
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Mutant:
    """A fault: in which file, under src/headrace, what stands instead of what, and which test or tests must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: the test that found it, "" for none, and why none did."""

    mutant: Mutant
    test: str
    problem: str
    seconds: float


def mutants(words: Sequence[str] = ()) -> list[Mutant]:
    """Returns the table's faults that have one of the words; all of them for none."""
    known = [field.name for field in fields(Mutant)]
    rows = [row for table in TABLES for row in tomllib.loads(table.read_text(encoding="utf-8"))["mutant"]]
    every = [Mutant(**{name: row[name] for name in known}) for row in rows]
    return [one for one in every if not words or any(word in f"{one.file} {one.what}" for word in words)]


class Tree:
    """A copy of the tree, in which one fault after the other is planted."""

    def __init__(self, folder: Path) -> None:
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy(ROOT / name, folder)
        self._folder = folder
        self._output = folder / "output.txt"
        self._planted: tuple[Path, str] | None = None
        self._pid, self._began = 0, 0.0

    def begin(self, mutant: Mutant) -> str:
        """Plants a fault and begins to run its tests; returns why it cannot, "" if it does."""
        file = self._folder / "src" / "headrace" / mutant.file
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if text.count(mutant.old) != 1:
            return f"stale: its text is there {text.count(mutant.old)} times"
        self._planted = file, text
        write(file, text.replace(mutant.old, mutant.new))
        self._pid, self._began = self._fork([*OPTIONS, "-x", mutant.tests]), time.monotonic()
        return ""

    def end(self) -> tuple[str, str, float] | None:
        """Returns which test failed, why none did, and the time it took; None while the tests run."""
        seconds, (pid, status) = time.monotonic() - self._began, os.waitpid(self._pid, os.WNOHANG)
        if not pid and seconds < TIMEOUT_S:
            return None
        if not pid:
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        assert self._planted
        write(*self._planted)
        if not pid:
            return "one that did not end", "", seconds
        code, failed = os.waitstatus_to_exitcode(status), next(iter(failures(self._output)), "")
        return failed, "" if failed else "NOT FOUND" if code == 0 else f"pytest ended with {code}", seconds

    def usual(self, tests: Sequence[str]) -> list[str]:
        """Returns the tests of the usual run in the files of these, without those that it leaves out."""
        files = sorted({test.partition("::")[0] for test in tests})
        os.waitpid(self._fork(["--collect-only", "-q", "-p", "no:cacheprovider", *files]), 0)
        return [line for line in self._output.read_text(encoding="utf-8").splitlines() if "::" in line]

    def failing(self, tests: Sequence[str]) -> list[str]:
        """Returns which of all these tests fail here."""
        ended = self._fork([*OPTIONS, "--numprocesses", "2", "--dist", "worksteal", *tests])
        code = os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1])
        found = list(failures(self._output))
        if code and not found:
            sys.exit(self._output.read_text(encoding="utf-8"))
        return found

    def _fork(self, arguments: Sequence[str]) -> int:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.chdir(self._folder)
            os.environ["PYTHONPATH"] = str(self._folder / "src")
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.path[0] = str(self._folder / "src")
            code = 1
            try:
                code = int(importlib.import_module("pytest").main(list(arguments)))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return pid


def failures(output: Path) -> Iterator[str]:
    """Yields the tests that pytest's summary names."""
    for line in output.read_text(encoding="utf-8", errors="replace").splitlines():
        word, _, rest = line.partition(" ")
        if word in ("FAILED", "ERROR") and rest.startswith("tests/"):
            yield rest.partition(" - ")[0]


def write(file: Path, text: str) -> None:
    """Writes a file with a time of its own: compiled files are told apart by whole seconds."""
    later = int(file.stat().st_mtime) + 1
    file.write_text(text, encoding="utf-8")
    os.utime(file, (later, later))


def plant(every: Sequence[Mutant], trees: Sequence[Tree]) -> Iterator[Outcome]:
    """Yields what becomes of each fault, in the order in which their tests end."""
    left, running = list(every), dict[int, Mutant]()
    while left or running:
        for place, tree in enumerate(trees):
            if place in running and (ended := tree.end()):
                yield Outcome(running.pop(place), *ended)
            while left and place not in running:
                mutant = left.pop(0)
                if problem := tree.begin(mutant):
                    yield Outcome(mutant, "", problem, 0.0)
                else:
                    running[place] = mutant
        time.sleep(LOOK_EVERY_S)


def main() -> int:
    """Returns 0 if each fault was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--at-once", type=int, default=2, help="faults at a time, each in a tree of its own")
    parser.add_argument("--results", type=Path, help="where the faults and the tests that find them are written")
    parser.add_argument("words", nargs="*", help="of the faults to plant; none for all")
    options = parser.parse_args()
    chosen = mutants(options.words)
    if not chosen:
        parser.error("no fault has one of these words in its file or description")
    began = time.monotonic()
    # A process with threads is not forked: these libraries would start some while they are loaded.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree(Path(folder, str(number))) for number in range(options.at_once)]
        tests = sorted({mutant.tests for mutant in chosen})
        usual = trees[0].usual(tests)
        run = [
            test for test in tests if test in usual or any(each.startswith((f"{test}[", f"{test}::")) for each in usual)
        ]
        failing = set(trees[0].failing(run))
        outcomes = [Outcome(each, "", "not in the usual run", 0.0) for each in chosen if each.tests not in run]
        for one in plant([each for each in chosen if each.tests in run], trees):
            outcomes.append(replace(one, problem="fails without it, too") if one.test in failing else one)
            print(line(outcomes[-1]), flush=True)
    missed = [each for each in outcomes if each.problem]
    took_s = time.monotonic() - began
    for text in (*map(line, missed), *(f"fails without a fault: {test}" for test in sorted(failing))):
        print(text, flush=True)
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} found in {took_s:.0f} s", flush=True)
    if options.results:
        save(options.results, outcomes, took_s)
    return 1 if missed or failing else 0


def line(outcome: Outcome) -> str:
    """Returns what is printed of a fault."""
    mutant = outcome.mutant
    by = ": ".join(filter(None, (outcome.test, outcome.problem)))
    return f"{outcome.seconds:4.0f} s  {mutant.file}: {mutant.what}: {by}"


def save(file: Path, outcomes: Sequence[Outcome], seconds: float) -> None:
    """Writes fault and test of each, and how long all took."""
    rows = [
        {"fault": each.mutant.what, "file": each.mutant.file, "found_by": each.test, "problem": each.problem}
        for each in sorted(outcomes, key=lambda each: (each.mutant.file, each.mutant.what))
    ]
    facts = {"date": date.today().isoformat(), "machine": platform.machine(), "cores": os.cpu_count()}
    record = {**facts, "seconds": round(seconds), "found": sum(not row["problem"] for row in rows), "faults": rows}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
