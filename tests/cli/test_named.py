"""Data, metrics, callbacks and trackers that a command names: by a file, by a module, by an installed package."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import registry
from headrace.averaging.outer_steps import OUTER_STEPS
from headrace.cli import app, run
from headrace.cli.commands.extending.named import CALLBACKS, METRICS, SOURCES, TRACKERS
from headrace.engine import shipping
from headrace.pipeline.schedules import SCHEDULES
from headrace.strategies.table import STRATEGIES
from headrace.transport.codec import CODECS

JOB = """
import functools, torch, headrace as hr
job = hr.Job(
    model=lambda: torch.nn.Linear(4, 3),
    data=(torch.randn(64, 4), torch.arange(64) % 3),
    eval_data=(torch.randn(9, 4), torch.arange(9) % 3),
    task=hr.tasks.multiclass(3),
    optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    global_batch_size=16,
    epochs=1,
)
"""

MINE = """
from pathlib import Path
import torch, headrace as hr
from headrace.pipeline.schedules.gpipe import GPipe
from headrace.report.trackers.curves import TrackedValue
from headrace.report.trackers.tracker import Tracker
from headrace.strategies.one_device import OneDevice
from headrace.transport.codec import Plain

print("this file prints")
number = 3


class Squares(hr.data.Source):
    def __init__(self, count=32):
        if count < 0:
            raise ValueError("there are fewer than no examples")
        self.count = count

    def __len__(self):
        return self.count

    def example(self, index, epoch):
        return torch.full((4,), index / 32), torch.tensor(index % 3)


def top(output, target, k=2):
    return hr.metrics.top_k_accuracy(output, target, k=k)


class Csv(Tracker):
    def __init__(self, path):
        super().__init__("Csv", every_s=0)
        self.path = Path(path)

    def begin(self, started):
        self.lines = []

    def write(self, entries):
        self.lines += [f"{each.tag},{each.step},{each.value}" for each in entries if isinstance(each, TrackedValue)]

    def end(self, status):
        self.path.write_text("\\n".join(self.lines))


class Halves(hr.Callback):
    def __init__(self, by=2):
        self.by = by

    def on_step(self, moment):
        moment.log({"halves": moment.step / self.by})


class Alone(OneDevice):
    name = "alone"


class Downwards(GPipe):
    pass


class Straight(Plain):
    pass


class Kept(hr.OuterStep):
    copies_kept = 1

    def model(self, state, mean):
        return mean

    def step(self, state, mean, copies, workers):
        for copy in copies:
            copy.copy_(mean)
"""

POINTS = (
    (STRATEGIES, "Alone"), (SCHEDULES, "Downwards"), (CODECS, "Straight"), (OUTER_STEPS, "Kept"), (SOURCES, "Squares"),
    (METRICS, "top"), (TRACKERS, "Csv"), (CALLBACKS, "Halves"),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job's file and one of a user's own; what is loaded of it is forgotten after the test."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PLACED", "FILES"):
        monkeypatch.setattr(registry, name, {})
        monkeypatch.setattr(shipping, name, getattr(registry, name))
    for table, _ in POINTS:
        monkeypatch.delitem(table.__dict__, "added", raising=False)
    yield tmp_path
    for table, _ in POINTS:
        table.__dict__.pop("added", None)
    sys.modules.pop("packaged", None)


def train(*options: str) -> str:
    ran = CliRunner().invoke(app, ["train", "job.py", "--device", "cpu", *options])
    assert ran.exit_code == 0, ran.output
    return ran.output


def settings(*texts: str) -> list[str]:
    return [part for text in texts for part in ("--set", f"job.{text}")]


@pytest.mark.slow
def test_a_run_on_workers_takes_them_from_a_file_and_is_evaluated_from_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = settings(
        "data=mine.py:Squares(48)", "eval_data=mine.py:Squares", "metrics=mine.py:top,first=mine.py:top(k=1),accuracy",
        "callbacks=mine.py:Halves(by=4)",
    )  # fmt: skip
    said = train(
        *named, "--tracker", "mine.py:Csv('n.csv')", "--strategy", "mirrored", "--workers", "2", "--run-dir", "run"
    )
    assert re.search(r"steps +3 of 16 examples", said)
    numbers = dict(line.rsplit(",", 1) for line in (folder / "n.csv").read_text().splitlines())
    assert (numbers["halves,3"], numbers["evaluation/first,3"]) == ("0.75", numbers["evaluation/accuracy,3"])
    assert "evaluation/top,3" in numbers
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    evaluated = CliRunner().invoke(app, ["evaluate", str(folder / "run")])
    assert evaluated.exit_code == 0, evaluated.output
    assert [line.split()[0] for line in evaluated.output.splitlines() if line.startswith(("top", "first"))] == [
        "top",
        "first",
    ]


@pytest.mark.slow
def test_an_installed_package_adds_each_kind_by_its_entry_points(folder: Path) -> None:
    (folder / "mine.py").rename(folder / "packaged.py")
    known = folder / "packaged-1.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1\n")
    lines = [f"[{table.group}]\nown = packaged:{name}\n" for table, name in POINTS]
    (known / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, str(folder))
    assert [table.group for table, _ in POINTS if "own" not in [*table]] == []
    train(*settings("data=own(48)", "metrics=own(k=1)", "callbacks=own"), "--tracker", "own('n.csv')")
    assert "halves,3,1.5" in (folder / "n.csv").read_text()
    for strategy in (
        "own",
        "parameter_server(push_codec='own')",
        "parameter_averaging(workers=2, outer='own')",
    ):
        train("--strategy", strategy)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (settings("data=mine.py:number"), "data cannot be a int; give a pair of tensors"),
        (settings("data=mine.py:number(2)"), "mine.py:number is 3, and takes no values; leave out (2)"),
        (settings("data=squares"), "there is no source of data 'squares'; write it as file.py:Name; known: none"),
        (settings("data=mine.py:Squares(a=1)"), "mine.py:Squares takes (count=32): got an unexpected keyword"),
        (settings("data=mine.py:Squares(-1)"), "cannot be made: ValueError: there are fewer than no examples"),
        (settings("data=mine.py:Squares(many)"), "mine.py:Squares(many): a text takes quotes, 'many'"),
        (settings("data=mine.py:Cubes"), "no name 'Cubes' in mine.py, which defines Alone, Csv, Downwards"),
        (settings("dat=mine.py:Squares"), "there is no setting 'dat' of the job; did you mean 'data'?"),
        (["--set", "data=mine.py:Squares"], "has no parameters; write --set job.data=mine.py:Squares"),
        (settings("metrics=mine.py:number"), "is 3, and a metric is a function of (output, target)"),
        (settings("metrics=mine.py:top,mine.py:top(k=1)"), "two metrics are called top; give one another name: top_2="),
        (settings("metrics=top_k_acc"), "there is no metric 'top_k_acc'; did you mean 'top_k_accuracy'?"),
        (settings("callbacks=mine.py:top"), "callbacks are objects of subclasses of hr.Callback, got <function top"),
        (["--tracker", "mine.py:Csv"], "missing a required argument: 'path'; write it as mine.py:Csv(...)"),
        (["--tracker", "mine.py:number"], "is 3, and must be a Tracker, or a function of one event"),
        (["--tracker", "csv"], "there is no tracker 'csv'; known: mlflow, tensorboard, wandb"),
    ],
)
def test_what_cannot_be_named_is_one_sentence(
    folder: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "job.py", "--device", "cpu", *options]) in (2, 5)
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert ("Traceback" in error) == ("fewer than no" in said)
