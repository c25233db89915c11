"""Bytes of a step: what a simulation predicts is what the ranks of a real run count."""

from __future__ import annotations

import functools
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import WorkerEnded
from headrace.spec.model import ModelSpec

BATCH = 16
STEPS = (4, 12)

CHOSEN = {
    "averaging": hr.ParameterAveraging(3, period=2),
    "averaging pipelines": hr.Hybrid(hr.ParameterAveraging(2, 2), hr.Pipeline(2, micro_batches=2)),
    "central storage": hr.CentralStorage(2),
    "downpour": hr.Downpour(1, servers=1, push_every=2, fetch_every=2, overlap=False),
    "four levels": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.Pipeline(2, micro_batches=2), hr.TensorParallel(2)),
    "fully sharded": hr.FullySharded(4),
    "fully sharded, kept": hr.FullySharded(2, reshard_after_forward=False),
    "gossip": hr.Gossip(3),
    "mirrored": hr.Mirrored(3),
    "mirrored pipelines": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, micro_batches=2)),
    "mirrored slices": hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
    "one device": hr.OneDevice(),
    "parameter server": hr.ParameterServer(2, servers=1, staleness_bound=0),
    "pipeline": hr.Pipeline(2, micro_batches=4),
    "sharded replicas": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    "sharded slices": hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)),
    "sharded stages": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2, micro_batches=2)),
    "sliced stages": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, micro_batches=2), hr.TensorParallel(2)),
    "tensor parallel": hr.TensorParallel(4),
    "unconnected": hr.Unconnected(2),
}
USUAL = (
    *("averaging", "central storage", "downpour", "fully sharded", "gossip", "mirrored", "mirrored slices"),
    *("parameter server", "pipeline", "tensor parallel"),
)
"""What the usual run has: each way to exchange, and one hybrid. Others' bytes are sums of those of their levels."""


def model() -> nn.Module:
    torch.manual_seed(0)
    wide = [part for _ in range(3) for part in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*wide, nn.Linear(256, 128))


def job(steps: int) -> hr.Job:
    inputs = torch.randn(4 * BATCH, 256, generator=torch.Generator().manual_seed(0))
    return hr.Job(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(inputs, torch.arange(4 * BATCH) % 128),
        global_batch_size=BATCH,
        steps=steps,
    )


@pytest.fixture(scope="module")
def profile() -> ModelSpec:
    return hr.profile(job(4), batch_sizes=[], seconds=0.01)


def counted(strategy: hr.Strategy, steps: int, run_dir: Path) -> float:
    """Returns the bytes of a rank of a run, on average."""
    run = hr.fit(job(steps), strategy, run_dir=run_dir, checkpoints=False, check=False)
    return mean(event.moved_bytes for event in run.events if isinstance(event, WorkerEnded))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in USUAL)) for name in sorted(CHOSEN)]
)
def test_bytes_of_a_step_are_those_that_ranks_count(name: str, profile: ModelSpec, tmp_path: Path) -> None:
    strategy = CHOSEN[name]
    # What ranks exchange before the first step and after the last is not a step's.
    few, many = (counted(strategy, steps, tmp_path / str(steps)) for steps in STEPS)
    cluster = Cluster((Host("here", 16, 64_000_000_000),))
    predicted = hr.simulate(
        profile, cluster, strategy, global_batch_size=BATCH, assumptions=hr.Assumptions(steps=STEPS[1] - STEPS[0])
    )
    assert (many - few) / (STEPS[1] - STEPS[0]) == pytest.approx(predicted.moved_bytes, rel=0.02)
