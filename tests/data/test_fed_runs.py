"""Runs whose workers read ahead: the same training in every read mode."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from belongings import belongings, left_since
from headrace import errors
from headrace.data import InputPipeline
from headrace.engine.threads import ThreadEngine

pytestmark = pytest.mark.slow


def noisy(example: Any, rng: Any) -> Any:
    x, y = example
    return x + 0.1 * rng.random(), y


def data() -> InputPipeline:
    generator = torch.Generator().manual_seed(0)
    return hr.data.from_arrays(
        torch.randn(96, 8, generator=generator), torch.randint(3, (96,), generator=generator)
    ).shuffle()


def trained(pipeline: InputPipeline, strategy: Any, folder: Path, **options: Any) -> hr.Run:
    torch.manual_seed(0)
    job = hr.Job(
        model=torch.nn.Linear(8, 3),
        task=hr.tasks.multiclass(3),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=pipeline,
        eval_data=pipeline,
        global_batch_size=8,
        epochs=3,
    )
    return hr.fit(job, strategy, run_dir=folder, **options)


@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(workers=2)])
def test_training_is_the_same_in_every_read_mode(strategy: Any, tmp_path: Path) -> None:
    before = belongings()
    runs = {
        str(way): trained(data().map(noisy, parallel=way), strategy, tmp_path / str(way))
        for way in ("inline", 2, "processes", "auto")
    }
    losses = {way: run.metrics["loss"] for way, run in runs.items()}
    assert len(set(losses.values())) == 1, losses
    assert left_since(before) == {}
    said = [event for event in runs["auto"].events if event.kind == "notice" and "data:" in event.text]
    for rank in range(runs["auto"].plan.workers):
        # Later ones say that it is read in another way, where training waits.
        assert "a batch takes" in next(event.text for event in said if event.rank == rank)


def test_workers_as_threads_read_ahead_too(tmp_path: Path) -> None:
    before = belongings()
    losses = {
        trained(data().map(noisy, parallel=way), hr.Mirrored(workers=2), tmp_path / way, engine=ThreadEngine()).metrics[
            "loss"
        ]
        for way in ("inline", "threads", "processes", "auto")
    }
    assert len(losses) == 1
    assert left_since(before) == {}


def broken(example: Any) -> Any:
    if example[1] == 2:
        raise ZeroDivisionError("nothing to divide by")
    return example


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_an_error_of_user_code_ends_the_run_with_its_traceback(way: str, tmp_path: Path) -> None:
    # Not the first examples, which are tried before the run.
    x, y = torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64)
    y[50] = 2
    pipeline = hr.data.from_arrays(x, y).map(broken, parallel=way)
    began = time.monotonic()
    with pytest.raises(errors.WorkerFailed, match=r"example 50 .*nothing to divide by") as caught:
        trained(pipeline, hr.Mirrored(workers=2), tmp_path / way)
    assert "in broken" in caught.value.traceback
    assert time.monotonic() - began < 60
