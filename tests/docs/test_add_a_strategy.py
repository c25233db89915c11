"""The page that adds a strategy, followed word for word in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docs.pages import ROOT, Block, blocks
from warm.programs import PYTHON

PAGE = ROOT / "docs" / "guide" / "add-a-strategy.md"
_NAMED = re.compile(r"# ([\w./-]+)\n")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the page's blocks applied."""
    copy = tmp_path_factory.mktemp("tree")
    forgotten = shutil.ignore_patterns("__pycache__", "docs", ".*")
    for folder in ("src", "tests", "examples"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=forgotten)
    for name in ("pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, copy)
    for block in blocks(PAGE):
        if block.language in ("python", "diff"):
            apply(block, copy)
    return copy


def apply(block: Block, tree: Path) -> None:
    """Writes the file that a Python block is, or adds a diff's lines after the line that it shows before them."""
    named = _NAMED.match(block.text)
    assert named, f"line {block.line} of the page names no file"
    file = tree / named[1]
    if block.language == "python":
        assert not file.exists()
        file.write_text(block.text, encoding="utf-8")
        return
    before, *added = block.text[named.end() :].splitlines()
    assert before.startswith(" ")
    assert added
    assert all(line.startswith("+") for line in added)
    text = file.read_text(encoding="utf-8")
    place = f"\n{before[1:]}\n"
    assert text.count(place) == 1, f"{named[1]} has {before[1:]!r} {text.count(place)} times"
    file.write_text(text.replace(place, "\n".join([place.rstrip("\n"), *(line[1:] for line in added), ""])))


def run(tree: Path, *command: str) -> str:
    """Runs a command in the copy, with its package instead of the installed one."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def python(tree: Path, *arguments: str) -> str:
    return run(tree, PYTHON, *arguments)


def test_little_is_to_be_read_before() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("To read before you begin, besides this page:")
    named = re.findall(r"`(\w+/\w+\.py)`", rest.partition("The `WorkerContext`")[0])
    assert len(named) == 4
    read = [PAGE, *(ROOT / "src" / "headrace" / name for name in named)]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in read) <= 700


def test_the_copy_is_what_runs(tree: Path) -> None:
    assert python(tree, "-c", "import headrace; print(headrace.__file__)").startswith(str(tree))


@pytest.mark.slow
def test_the_strategy_keeps_the_contract(tree: Path, request: pytest.FixtureRequest) -> None:
    """In the usual run, the contract itself; with --full, whatever is said of every synchronous strategy."""
    quiet = ("-q", "-p", "no:cacheprovider")
    full = request.config.getoption("--full")
    where = ["--full", "tests/strategies"] if full else ["tests/strategies/test_contract.py"]
    shown = python(tree, "-m", "pytest", *quiet, *where, "-k", "first_worker or every_strategy_has_its_row")
    passed = re.search(r"(\d+) passed", shown)
    assert passed, shown
    assert int(passed[1]) > (100 if full else 40)
    assert "skipped" not in shown


@pytest.mark.slow
def test_the_strategy_keeps_the_rules_of_the_house(tree: Path) -> None:
    python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_architecture.py", "tests/test_exports.py")
    new = "src/headrace/strategies/first_worker.py"
    ruff = str(Path(PYTHON).with_name("ruff"))
    run(tree, ruff, "check", new)
    run(tree, ruff, "format", "--check", new)


@pytest.mark.slow
def test_the_command_line_has_it(tree: Path) -> None:
    program = "import sys; from headrace.cli import run; sys.exit(run(sys.argv[1:]))"
    job = "examples/digits/job.py"
    shown = python(
        tree, "-c", program, "train", job, "--strategy", "first_worker", "--workers", "2", "--run-dir", "run"
    )
    assert "2 workers" in shown
    accuracy = re.search(r"accuracy (\d\.\d+) after 5 epochs", shown)
    assert accuracy, shown
    assert accuracy[1] in PAGE.read_text(encoding="utf-8")
