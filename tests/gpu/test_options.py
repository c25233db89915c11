"""Options on a GPU: half precision with its loss scale, graph mode, micro-batches."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import headrace as hr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def make() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def trained(strategy: hr.Strategy, **options: object) -> hr.Run:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(150, 1, 8, 8, generator=generator), torch.randint(10, (150,), generator=generator)
    job = hr.Job(
        model=make,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=(x, y),
        eval_data=(x, y),
        global_batch_size=32,
        epochs=3,
        options=hr.Options(**options),  # type: ignore[arg-type]
    )
    return hr.fit(job, strategy, device="cuda")


OPTIONS = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "clip_norm": 5.0},
    "fp16-pieces": {"precision": "fp16", "accumulate": 4},
    "compile": {"compile": True},
    "pieces": {"accumulate": 4, "ema_decay": 0.1},
}


@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(1), hr.CentralStorage(1)], ids=lambda it: it.name)
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_an_option_trains_as_without_it(strategy: hr.Strategy, option: str) -> None:
    run, plain = trained(strategy, **OPTIONS[option]), trained(strategy)
    # Some first rounds may overflow, each of which halves the scale and leaves out an update of fifteen.
    assert run.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=0.1)
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}


def test_a_loss_that_is_none_is_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 1, 8, 8, generator=generator), torch.randint(10, (64,), generator=generator)
    x[5] = math.nan
    job = hr.Job(
        model=make,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.05),
        data=(x, y),
        global_batch_size=16,
        epochs=2,
        options=hr.Options(on_nonfinite="skip"),
    )
    run = hr.fit(job, hr.Mirrored(1), device="cuda")
    assert [event.kind for event in run.events].count("non_finite") == 2
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())
