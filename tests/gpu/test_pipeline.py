"""Stages on GPUs are one GPU: several on one, through host memory, and where there are several GPUs, by NCCL."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.pipeline.schedules import SCHEDULES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)), nn.Linear(64, 3)).double()


def job(**options: object) -> hr.Job:
    x = torch.randn(150, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return hr.Job(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=(x, (x.sum(1) > 0).long()),
        global_batch_size=32,
        epochs=2,
        options=hr.Options(**options),  # type: ignore[arg-type]
    )


def apart(strategy: hr.Pipeline, device: str, **options: object) -> float:
    """Returns how far a pipeline is from one GPU."""
    one, stages = (
        hr.fit(job(**options), each, device=where, check=False).model.state_dict()
        for each, where in ((hr.OneDevice(), "cuda"), (strategy, device))
    )
    return max(float((stages[name].cpu() - tensor.cpu()).abs().max()) for name, tensor in one.items())


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_stages_that_share_a_gpu(recompute: str) -> None:
    assert apart(hr.Pipeline(2, 4, "1f1b", recompute), "cuda:0,cuda:0", clip_norm=0.3) <= 1e-9


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device here")
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_stages_on_gpus_of_their_own(schedule: str) -> None:
    stages = min(4, torch.cuda.device_count())
    assert apart(hr.Pipeline(stages, 4, schedule), "cuda") <= 1e-9
