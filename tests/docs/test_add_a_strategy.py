"""The page that adds strategies, followed word for word in a copy of the tree."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import headrace as hr
from docs.pages import ROOT, Block, blocks
from warm.programs import PYTHON, programs

PAGE = ROOT / "docs" / "guide" / "add-a-strategy.md"
NEW = ("first_worker", "ring_gossip")
_EXAMPLES = re.compile(r"\n    Examples:\n(?: {8}.*\n)+")
_NAMED = re.compile(r"# ([\w./-]+)\n")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the page's blocks applied."""
    copy = tmp_path_factory.mktemp("tree")
    # What Python has compiled is good for the copy as well.
    forgotten = shutil.ignore_patterns("docs", ".*")
    for folder in ("src", "tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=forgotten)
    (copy / "docs").mkdir()
    for name in ("pyproject.toml", "docs/architecture.md"):
        shutil.copy(ROOT / name, copy / name)
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
    """Runs Python with the copy's package and torch imported already, and all that it starts as well."""
    return run(tree, str(programs(tree / "src") / "python"), *arguments)


def to_read(begins: str, ends: str, lines: list[str]) -> int:
    """Returns how many lines of source are to be read besides some of the page's; examples are for callers."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(begins)
    named = re.findall(r"`(\w+/\w+\.py)`", rest.partition(ends)[0])
    assert len(named) in (3, 4)
    files = [ROOT / "src" / "headrace" / name for name in named]
    texts = [_EXAMPLES.sub("", file.read_text(encoding="utf-8")) for file in files]
    return len(lines) + sum(len(text.splitlines()) for text in texts)


def test_little_is_to_be_read_before() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    half = lines.index("## Workers with parameters of their own")
    assert to_read("To read before you begin, besides this page:", "The `WorkerContext`", lines[:half]) <= 700
    assert to_read("To read for this part, besides this\npage:", "The example is", lines) <= 700


def test_an_example_is_at_most_100_lines() -> None:
    code = [block.text for block in blocks(PAGE) if block.language == "python"]
    assert len(code) == len(NEW)
    assert max(len(text.splitlines()) for text in code) <= 100


@pytest.mark.full
@pytest.mark.slow
def test_the_strategies_keep_the_contract_and_the_rules_of_the_house(
    tree: Path, request: pytest.FixtureRequest
) -> None:
    """In the usual run, the contract itself; with --full, whatever is said of every strategy."""
    # A warm Python has imported some of pytest's plug-ins already.
    quiet = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    full = request.config.getoption("--full")
    where = ["--full", "tests/strategies"] if full else ["tests/strategies/test_contract.py"]
    rules = ["tests/test_architecture.py", "tests/test_exports.py"]
    first, *others = NEW
    # In the usual run, processes are tried under the first alone: what the other runs in them is gossip's. Single
    # precision takes the same code.
    mine = [first if full else f"({first} and not single_precision)"]
    mine += [other if full else f"({other} and not process)" for other in others]
    chosen = " or ".join([*mine, "every_strategy_has_its_row", "the_package_keeps_the_rule", "test_exports"])
    shown = python(tree, "-m", "pytest", *quiet, *where, *rules, "-k", chosen)
    passed = re.search(r"(\d+) passed", shown)
    assert passed, shown
    assert int(passed[1]) > (250 if full else 100)
    assert "skipped" not in shown
    for name in NEW:
        new = f"src/headrace/strategies/{name}.py"
        ruff = str(Path(PYTHON).with_name("ruff"))
        run(tree, ruff, "check", new)
        run(tree, ruff, "format", "--check", new)


@pytest.mark.slow
def test_python_and_the_command_line_have_them(tree: Path) -> None:
    """By the line in the dict alone."""
    program = """
import sys
import headrace as hr
from headrace.cli import run
print(hr.__file__, hr.FirstWorker(2), hr.RingGossip(2))
sys.exit(run(sys.argv[1:]))
"""
    job = "examples/digits/job.py"
    # A warm Python of the copy would import more than this one command does.
    shown = run(
        tree, PYTHON, "-c", program, "train", job, "--strategy", "first_worker", "--workers", "2", "--run-dir", "run"
    )
    assert shown.startswith(str(tree))
    assert "FirstWorker(workers=2) RingGossip(workers=2)" in shown
    assert "2 workers" in shown
    accuracy = re.search(r"accuracy (\d\.\d+) after 5 epochs", shown)
    assert accuracy, shown
    told = re.search(r"that of `one_device`, (\d\.\d+)\.", PAGE.read_text(encoding="utf-8"))
    assert told
    # An example near the border falls on either side by the last bits of a processor's sums; 360 are evaluated.
    assert abs(float(accuracy[1]) - float(told[1])) <= 2 / 360


def test_a_loop_of_ones_own_under_the_strategy_is_one_device() -> None:
    code = next(block.text for block in blocks(PAGE) if "class FirstWorker(Strategy)" in block.text)
    module = types.ModuleType("first_worker_of_the_page")
    sys.modules[module.__name__] = module
    exec(code, vars(module))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    loss, sgd = nn.MSELoss(), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = hr.Job(
        model=lambda: nn.Linear(4, 1).double(), loss=loss, optimizer=sgd, data=(inputs, inputs.sum(1, keepdim=True)),
        global_batch_size=4, epochs=3,
    )  # fmt: skip

    def loop(worker: hr.Worker) -> None:
        for batch, target in worker.batches():
            output = worker.model(batch)
            worker.backward(loss(output, target) if len(target) else output.sum())
            worker.update()

    one = hr.fit(job, engine=hr.ThreadEngine()).model
    for workers in (1, 2, 3):
        own = hr.launch(loop, job, module.FirstWorker(workers), engine=hr.ThreadEngine()).model
        assert torch.allclose(own.weight, one.weight, rtol=0, atol=1e-12)
