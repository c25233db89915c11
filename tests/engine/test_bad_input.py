"""What bad input gets: an error that says what, the numbers and the remedy, before any process starts."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from engine.victims import EXAMPLES, INPUTS, TARGETS, make_job
from headrace.engine.base import Engine, RunProgress
from headrace.errors import (
    DataError,
    HeadraceError,
    InfeasiblePlan,
    JobError,
    UnfitMachine,
    UnknownName,
    UsageError,
)
from headrace.machine import identity
from headrace.shared_memory import segment
from headrace.worker.run_spec import RunSpec

PAIR = hr.Mirrored(2)


class Untouched(Engine):
    """Must never be asked to run anything."""

    def run(self, order: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        raise AssertionError("a process would have started")

    def close(self) -> None:
        raise AssertionError("not ours to close")


def fit(job: hr.Job, strategy: Any = PAIR, **changes: Any) -> None:
    hr.fit(job, strategy, engine=Untouched(), **changes)


def not_built() -> nn.Module:
    raise RuntimeError("no weights here")


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.lock = threading.Lock()


def frozen() -> nn.Module:
    return nn.Linear(4, 1).requires_grad_(False)


class Derived(nn.Embedding):
    """A class of its own, which may do anything with its weight."""


def sparse() -> nn.Module:
    return nn.Sequential(Derived(8, 1, sparse=True), nn.Flatten(), nn.Linear(4, 1))


def only_sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 1, sparse=True), nn.Flatten(), nn.AvgPool1d(4))


CLASSES = hr.tasks.multiclass(3)
three = functools.partial(nn.Linear, 4, 3)

JOBS: dict[str, tuple[dict[str, Any], type[HeadraceError], str]] = {
    "model raises": ({"model": not_built}, JobError, "the model cannot be built: RuntimeError: no weights here"),
    "model is no module": ({"model": lambda: "net"}, JobError, "must be or return a torch.nn.Module, got str"),
    "model lacks arguments": ({"model": nn.Linear}, JobError, "cannot be built: TypeError: .* missing 2 required"),
    "model holds a lock": ({"model": Locked()}, JobError, "cannot be copied; give a function that builds it"),
    "model does not fit": ({"model": lambda: nn.Linear(5, 1)}, JobError, r"cannot be run on data: .*\(2x4 and 5x1\)"),
    "model takes more": (
        {"model": lambda: nn.Bilinear(4, 4, 1)},
        JobError,
        r"'input2'. Of a batch that is a tuple of 2",
    ),
    "model has another type": ({"model": lambda: nn.Linear(4, 1).double()}, JobError, "cannot be run on data: "),
    "all frozen": ({"model": frozen}, JobError, "no parameter to train: all are frozen, or there is none"),
    "only sparse": (
        {"model": only_sparse, "data": (torch.zeros(8, 4).long(), TARGETS[:8])},
        JobError,
        r"nothing but sparse embeddings \(.*0.*\), and the workers exchange .*; give it a dense layer",
    ),
    "sparse": (
        {"model": sparse, "data": (torch.zeros(8, 4).long(), TARGETS[:8])},
        JobError,
        "layer '0' is a Derived with sparse gradients, and only those of nn.Embedding .* travel as rows",
    ),
    "loss is no scalar": (
        {"task": None, "loss": lambda output, target: output - target},
        UsageError,
        r"the loss is no scalar but a tensor of shape \(2, 1\); reduce it by .mean\(\)",
    ),
    "loss is a number": (
        {"task": None, "loss": lambda output, target: (output - target).mean().item()},
        UsageError,
        "must be a scalar tensor or an hr.Mean, got float .* without .item()",
    ),
    "loss raises": (
        {"task": None, "loss": lambda output, target: output.nonsense},
        JobError,
        "the loss cannot be computed on data: AttributeError: .*nonsense",
    ),
    "metric is no scalar": ({"metrics": {"raw": lambda output, target: output}}, UsageError, "raw is no scalar"),
    "metric raises": (
        {"metrics": {"bad": lambda output, target: 1 / 0}},
        JobError,
        "the metric 'bad' cannot be computed on data: ZeroDivisionError",
    ),
    "target has another shape": ({"data": (INPUTS, TARGETS.expand(-1, 3))}, DataError, r"\(2, 1\) and target \(2, 3\)"),
    "target is no class": ({"task": CLASSES, "model": three}, DataError, r"multiclass\(3\) takes class indices"),
    "data is empty": ({"data": (INPUTS[:0], TARGETS[:0])}, DataError, "it has 0 examples; training needs at least 1"),
    "data is ragged": ({"data": (INPUTS, TARGETS[:3])}, DataError, r"differ in length \(0: 64, 1: 3\).* cut them to 3"),
    "data is a name": ({"data": "train.csv"}, DataError, "data cannot be a str; give a pair of tensors"),
    "eval data is empty": ({"eval_data": (INPUTS[:0], TARGETS[:0])}, DataError, "eval_data: .*it has 0 examples"),
    "eval data is ragged": ({"eval_data": (INPUTS, TARGETS[:3])}, DataError, r"eval_data: .*\(0: 64, 1: 3\)"),
    "eval data does not fit": ({"eval_data": (INPUTS[:, :3], TARGETS)}, JobError, "cannot be run on eval_data"),
    "eval target does not": ({"eval_data": (INPUTS, INPUTS)}, DataError, r"\(2, 1\) and target \(2, 4\)"),
    "batch below the workers": (
        {"global_batch_size": 1},
        InfeasiblePlan,
        "a global batch of 1 cannot be split among 2 workers; use global_batch_size=2 or more, or fewer workers",
    ),
    "examples below the workers": (
        {"data": (INPUTS[:1], TARGETS[:1])},
        DataError,
        "1 example for 2 workers; use fewer workers, or give more data",
    ),
    "inputs select nothing": (
        {"inputs": "image"},
        JobError,
        "inputs='image' does not fit a batch that is a tuple of 2",
    ),
    "target selects nothing": ({"target": 7}, JobError, "target=7 does not fit a batch that is a tuple of 2"),
    "optimizer is none": (
        {"optimizer": lambda named: None},
        UsageError,
        "must return a torch.optim.Optimizer, got None",
    ),
    "optimizer raises": (
        {"optimizer": functools.partial(torch.optim.SGD, lr=-1)},
        JobError,
        "the optimizer cannot be made: ValueError: Invalid learning rate",
    ),
    "optimizer of something else": (
        {"optimizer": lambda named: torch.optim.SGD(nn.Linear(1, 1).parameters())},
        UsageError,
        "2 of the tensors in the job's SGD are not parameters of the model",
    ),
    "LBFGS": ({"optimizer": torch.optim.LBFGS}, UsageError, "LBFGS.step.* closure"),
    "task is a name": ({"task": "regression"}, UsageError, "must be one of hr.tasks, .* got 'regression'"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_cannot_be_trained(name: str, tmp_path: Path) -> None:
    changes, kind, message = JOBS[name]
    with pytest.raises(kind, match=message) as caught:
        fit(make_job(**changes), run_dir=tmp_path / "run")
    assert type(caught.value) is kind
    assert not (tmp_path / "run").exists(), "the same directory can be used when the job is repaired"


DEFINITIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "steps and epochs": (lambda: make_job(steps=3), "give either epochs or steps, got epochs=1, steps=3"),
    "neither": (lambda: make_job(epochs=None), "got epochs=None, steps=None"),
    "no steps": (lambda: make_job(epochs=None, steps=0), "steps must be a whole number of at least 1, got 0"),
    "half epochs": (lambda: make_job(epochs=1.5), "epochs must be a whole number of at least 1, got 1.5"),
    "batch is true": (lambda: make_job(global_batch_size=True), "global_batch_size must be a whole number"),
    "two losses": (lambda: make_job(loss=nn.MSELoss()), "either a task .* or a loss, not both or neither"),
    "no loss": (lambda: make_job(task=None), "either a task .* or a loss, not both or neither"),
    "seed": (lambda: make_job(seed=-1), "seed must be a whole number from 0 to 2\\*\\*32 - 1, got -1"),
    "seed is text": (lambda: make_job(seed="7"), "seed must be a whole number .* got '7'"),
    "metrics": (lambda: make_job(metrics=[nn.MSELoss()]), "metrics must be a dict of names to functions, got list"),
    "a metric called loss": (
        lambda: make_job(metrics={"loss": nn.L1Loss()}),
        "evaluations have the job's loss as 'loss'; give the metric another name",
    ),
    "options": (lambda: make_job(options={"clip_norm": 1}), r"options must be hr.Options\(...\), got dict"),
    "optimizer made already": (
        lambda: make_job(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())),
        r"optimizer must be callable, got SGD \( Parameter Group 0 .{0,60}; give .*partial\(torch.optim.SGD, lr=0.1\)$",
    ),
    "model is a name": (lambda: make_job(model="resnet"), "model must be callable, got 'resnet'"),
    "clip 0": (lambda: hr.Options(clip_norm=0), "clip_norm must be a number above 0, got 0; None switches it off"),
    "clip text": (lambda: hr.Options(clip_norm="1"), "clip_norm must be a number above 0, got '1'"),  # type: ignore[arg-type]
    "batch norm": (lambda: hr.Options(batch_norm="synced"), "batch_norm is 'local' or 'sync', got 'synced'"),
    "eval batch 0": (lambda: hr.Options(eval_batch_size=0), "eval_batch_size must be a whole number of at least 1"),
    "eval batch 1.5": (lambda: hr.Options(eval_batch_size=1.5), "got 1.5"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_definition_that_cannot_be_meant(name: str) -> None:
    make, message = DEFINITIONS[name]
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("workers", [0, -1, "2", True, 2.0])
@pytest.mark.parametrize("kind", [hr.Mirrored, hr.CentralStorage, hr.Unconnected])
def test_workers_that_are_no_number(kind: Callable[..., hr.Strategy], workers: Any) -> None:
    with pytest.raises(UsageError, match=f"whole number of at least 1, got {re.escape(repr(workers))}"):
        kind(workers)


@pytest.mark.parametrize("timeout_s", [0, -1, 0.5, float("nan"), float("inf"), "3", None])
def test_a_timeout_that_no_process_can_keep(timeout_s: Any) -> None:
    with pytest.raises(UsageError, match="timeout_s must be a number of at least 1, got"):
        fit(make_job(), timeout_s=timeout_s)


@pytest.mark.parametrize("engine", [hr.ThreadEngine, "threads"])
def test_an_engine_that_is_none(engine: Any) -> None:
    with pytest.raises(UsageError, match=r"engine must be hr.ThreadEngine\(\), another engine or None, got"):
        hr.fit(make_job(), engine=engine)


def test_a_run_directory_that_is_no_path() -> None:
    with pytest.raises(UsageError, match="run_dir must be the path of a directory, or None, got 3"):
        fit(make_job(), run_dir=3)  # type: ignore[arg-type]


def test_a_strategy_that_does_not_exist() -> None:
    with pytest.raises(UnknownName, match="no strategy 'mirored'; did you mean 'mirrored'"):
        fit(make_job(), "mirored")


@pytest.mark.parametrize("strategy", [hr.Mirrored, None, 2])
def test_a_strategy_that_is_none(strategy: Any) -> None:
    with pytest.raises(UsageError, match=r"a strategy is a name \('mirrored'\) or hr.Mirrored\(...\), got"):
        fit(make_job(), strategy)


def test_a_job_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"must be an hr.Job\(...\), got dict"):
        fit({"model": nn.Linear(4, 1)})  # type: ignore[arg-type]


def test_a_loop_that_is_none() -> None:
    with pytest.raises(UsageError, match="train must be a function that takes a worker, got int"):
        hr.launch(3, make_job(), PAIR, engine=Untouched())  # type: ignore[arg-type]


def test_a_machine_too_small_for_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "spare_memory_bytes", lambda: 100)
    with pytest.raises(InfeasiblePlan, match=r"mirrored needs 140 bytes of host memory .* 100 left; use fewer workers"):
        fit(make_job())


def test_memory_that_goes_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "spare_memory_bytes", lambda: 100)
    with pytest.raises(UnfitMachine, match="needs 4,096 bytes of shared memory and the machine has 100 left"):
        segment.SharedSegment.create(4096, "probe")


@pytest.mark.parametrize("where", ["file", "file/below", "proc"])
def test_a_run_directory_that_cannot_be_written(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    run_dir = "/proc/headrace" if where == "proc" else tmp_path / where
    with pytest.raises(UnfitMachine, match=f"cannot write to the run directory {run_dir}: .*; name another"):
        fit(make_job(), run_dir=run_dir)


def test_a_run_directory_that_holds_a_run(tmp_path: Path) -> None:
    hr.fit(make_job(), engine=hr.ThreadEngine(), run_dir=tmp_path)
    with pytest.raises(UsageError, match="holds a run already; name another run_dir, or delete it"):
        fit(make_job(), run_dir=tmp_path)


def test_what_the_job_refers_to_is_asked_before_a_process_is_forked(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(JobError, match="the job cannot be sent to a worker: TypeError: cannot pickle"):
        hr.fit(make_job(model=lambda: (lock, nn.Linear(4, 1))[1]), PAIR, run_dir=tmp_path / "run")
    assert not list(tmp_path.glob("run/logs/*"))


@pytest.mark.parametrize(("model", "changed"), [(nn.Linear(4, 1), False), (functools.partial(nn.Linear, 4, 1), True)])
def test_looking_at_a_job_changes_nothing(model: Any, changed: bool) -> None:
    """Not the caller's model, whose weights start the run, and not the caller's random numbers."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()} if not changed else {}
    state = torch.random.get_rng_state()
    run = hr.fit(make_job(model=model), engine=hr.ThreadEngine())
    assert torch.equal(torch.random.get_rng_state(), state)
    if not changed:
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
        assert model.training
        assert model.weight.grad is None
        assert not torch.equal(run.model.weight, model.weight)  # type: ignore[arg-type]


class Spoiled(nn.Linear):
    """Makes NaN of one example."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        spoiled = (inputs == INPUTS[EXAMPLES - 1]).all(1, keepdim=True)
        return torch.where(spoiled, float("nan"), super().forward(inputs))


def test_a_loss_that_is_nan_names_step_and_rank() -> None:
    seen: list[Any] = []
    with pytest.raises(HeadraceError, match=r"the loss is nan on rank [01] at step \d; lower the learning rate"):
        hr.fit(make_job(model=Spoiled), PAIR, engine=hr.ThreadEngine(), on_event=seen.append)
    (failed,) = [event for event in seen if event.kind == "failed"]
    (bad,) = [event for event in seen if event.kind == "non_finite"]
    assert f"on rank {bad.ranks[0]} at step {bad.step}" in failed.cause
    assert (bad.rank, bad.action) == (failed.rank, "raise")
