"""Plants known faults in a copy of the tree, one at a time: the tests that are named beside each must find it.

A line for each fault: found, NOT FOUND, or stale where its text is no longer in the file exactly once. The tests run on
the copy without a fault first, so that what fails then is not taken for a find.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants.toml"
FOLDERS, FILES = ("src", "tests", "examples", "docs", "benchmarks"), ("pyproject.toml", "CONTRIBUTING.md", "README.md")
TIMEOUT_S = 300
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Mutant:
    """A fault: in which file, under src/headrace, what stands instead of what, and which tests must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


def mutants(words: Sequence[str] = ()) -> list[Mutant]:
    """Returns the table's faults that have one of the words; all of them for none."""
    every = [Mutant(**row) for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]]
    return [one for one in every if not words or any(word in f"{one.file} {one.what}" for word in words)]


def run(tree: Path, tests: str) -> int:
    """Runs a selection of tests; returns pytest's exit code. What takes too long counts as failed."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "60", *tests.split()]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, timeout=TIMEOUT_S, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return FAILED
    return done.returncode


def plant(mutant: Mutant, tree: Path, passing: dict[str, bool]) -> str:
    """Returns what became of a fault."""
    file = tree / "src" / "headrace" / mutant.file
    if not file.exists():
        return "stale: no such file"
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"stale: its text is there {text.count(mutant.old)} times"
    if mutant.tests not in passing:
        passing[mutant.tests] = run(tree, mutant.tests) == PASSED
    if not passing[mutant.tests]:
        return "its tests do not pass without it"
    try:
        write(file, text.replace(mutant.old, mutant.new))
        code = run(tree, mutant.tests)
    finally:
        write(file, text)
    return {PASSED: "NOT FOUND", FAILED: "found"}.get(code, f"pytest ended with {code}")


def write(file: Path, text: str) -> None:
    """Writes a file with a time of its own: compiled files are told apart by whole seconds."""
    later = int(file.stat().st_mtime) + 1
    file.write_text(text, encoding="utf-8")
    os.utime(file, (later, later))


def main() -> int:
    """Returns 0 if each fault was found."""
    passing: dict[str, bool] = {}
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy(ROOT / name, tree)
        for mutant in mutants(sys.argv[1:]):
            began = time.monotonic()
            came = plant(mutant, tree, passing)
            missed += came != "found"
            print(f"{came:10} {time.monotonic() - began:5.0f} s  {mutant.file}: {mutant.what}", flush=True)  # noqa: T201
    print(f"{missed} not found" if missed else "all found")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
