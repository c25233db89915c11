"""Public training scripts in our own words: in two processes they train what they train alone, in fp64, to 1e-9."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.both_ways import PORTS, WORLD, lines_of

NAMES = sorted(path.stem for path in PORTS.glob("*.py"))
USUAL = ("mnist", "nanogpt", "reinforce", "wgan_gp")
"""What the usual run has: a loader and a schedule, clipped sums of gradients, random numbers, two optimizers."""
BY_DEFINITION = {
    "reinforce": "each draws random numbers of its own",
    "simclr": "the loss of an example depends on other examples of its share",
}
"""Scripts whose numbers are others in several processes, and what rank 0 says of that before the first step."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Runs a script both ways; returns the folder of what it left."""
    folder = tmp_path_factory.mktemp("scripts")
    command = [sys.executable, str(PORTS.parent / "both_ways.py"), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        reads, writes = process.stdout, process.stdin

        def ask(name: str) -> Path:
            writes.write(f"{name}\n")
            writes.flush()
            assert reads.readline() == f"{name}\n"
            return folder

        yield ask
        writes.close()
        process.wait()


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name not in USUAL)) for name in NAMES])
def test_two_processes_train_what_the_script_trains_alone(run: Callable[[str], Path], name: str) -> None:
    folder = run(name)
    printed = {place: (folder / f"{name}-{place}.txt").read_text() for place in ("alone", *map(str, range(WORLD)))}
    missing = [text for place, text in printed.items() if not (folder / f"{name}-{place}.json").exists()]
    assert not missing, "\n".join(missing)
    plain, *ranks = (json.loads((folder / f"{name}-{place}.json").read_text()) for place in printed)
    assert plain["history"]
    if name in BY_DEFINITION:
        assert BY_DEFINITION[name] in printed["0"]
        plain = {**ranks[0], "history": ranks[1]["history"]}
    for rank, numbers in enumerate(ranks):
        if name in BY_DEFINITION:
            numbers["history"] = plain["history"]
        assert numbers.keys() == plain.keys()
        for what, values in plain.items():
            assert numbers[what] == pytest.approx(values, rel=1e-9, abs=1e-9), (what, rank, printed["0"])


def test_few_lines_change() -> None:
    changed = {name: lines_of(name)[1] for name in NAMES}
    assert max(changed.values()) <= 10, changed
    assert statistics.median(changed.values()) <= 4, changed
