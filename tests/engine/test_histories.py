"""A run that goes on from an older checkpoint, from the end, or past a round; optimizers with numbers of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from engine.lasting import OFTEN, broken_off, fail, files_of, lasting_job
from headrace.checkpoint import CheckpointFolder
from headrace.engine.local.engine import LocalEngine
from headrace.errors import UsageError, WorkerFailed
from headrace.spec.events import Notice

MANY = hr.Checkpoints(every_steps=2, every_s=None, keep=100)


def fit(run_dir: Path, **asked: Any) -> hr.Run:
    job = lasting_job("plain", **{"steps": 8, "epochs": None, **asked.pop("job", {})})
    return hr.fit(job, run_dir=run_dir, engine=hr.ThreadEngine(), **{"checkpoints": MANY, **asked})


def test_who_goes_on_from_an_older_one_leaves_the_newer_history(tmp_path: Path) -> None:
    fit(tmp_path)
    dying = functools.partial(broken_off, fail, 4, 0)
    job = lasting_job("plain", steps=8, epochs=None)
    with pytest.raises(WorkerFailed):
        hr.launch(dying, job, run_dir=tmp_path, engine=hr.ThreadEngine(), resume=tmp_path / "checkpoints/step-00000004")
    # Before its first save of its own, and yet those after step 4 are gone.
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == (2, 4)


def test_a_run_that_is_over_is_evaluated_and_not_saved_again(tmp_path: Path) -> None:
    first = fit(tmp_path / "a")
    before = files_of(tmp_path / "a")
    again = fit(tmp_path / "a", resume=True, reset_optimizer=True)
    assert files_of(tmp_path / "a") == before
    elsewhere = fit(tmp_path / "b", resume=tmp_path / "a", job={"steps": 5})
    assert again.metrics == elsewhere.metrics == first.metrics
    told = [event.text for event in elsewhere.events if isinstance(event, Notice)]
    assert "the checkpoint has 8 rounds and the job 5: nothing is left to do" in told


def test_early_stopping_that_follows_something_else_begins_anew(tmp_path: Path) -> None:
    stop = functools.partial(hr.EarlyStopping, patience=2)
    fit(tmp_path, job={"options": {"eval_every": 1, "early_stopping": stop("loss")}})
    options = {"eval_every": 1, "early_stopping": stop("accuracy", mode="max")}
    run = fit(tmp_path, resume=True, job={"steps": 20, "options": options})
    told = [event.text for event in run.events if isinstance(event, Notice)]
    assert any(text.startswith("since it was saved: early_stopping was ") for text in told)
    assert all("loss has got no better" not in text for text in told)


def leaving_out(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round != 1 or worker.rank == 0:
            worker.step(batch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.Mirrored(2), hr.CentralStorage(2)], ids=lambda strategy: strategy.name)
def test_a_loop_that_leaves_out_a_round(engine: LocalEngine, tmp_path: Path, strategy: hr.Strategy) -> None:
    job = lasting_job("plain", steps=8, epochs=None)
    with pytest.raises(WorkerFailed, match=r"rank 1 went on without worker.step\(\) .* in round 1; every worker steps"):
        hr.launch(leaving_out, job, strategy, engine=engine, run_dir=tmp_path, checkpoints=OFTEN)


class Counting(torch.optim.SGD):
    """Keeps numbers of Python's beside its tensors."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["pace"] = state.get("pace", 1.0) * 0.9
                parameter.data.add_(parameter.grad, alpha=-group["lr"] * state["pace"] ** state["count"])
        return None


class Keeping(torch.optim.SGD):
    """Keeps what no checkpoint can hold."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["last"] = {1}
        return super().step(closure)


@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.CentralStorage(2)], ids=lambda strategy: strategy.name)
def test_numbers_of_an_optimizer_go_on_as_numbers(tmp_path: Path, strategy: hr.Strategy) -> None:
    changes = {"optimizer": functools.partial(Counting, lr=0.5)}
    fit(tmp_path / "whole", strategy=strategy, job=changes)
    for steps in (5, 8):
        fit(tmp_path / "parts", strategy=strategy, job={**changes, "steps": steps}, resume=steps == 8)
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert parts == whole


def test_what_no_checkpoint_can_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Keeping keeps a set as 'last' of '0.weight', which no checkpoint can"):
        fit(tmp_path, job={"optimizer": functools.partial(Keeping, lr=0.5)})
