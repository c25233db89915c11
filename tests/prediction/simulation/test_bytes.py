"""Bytes of a step: what a simulation predicts is what the ranks of a real run count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import WorkerEnded
from headrace.spec.model import ModelSpec

BATCH = 16
STEPS = (4, 12)

CHOSEN = {
    "attending ring": hr.ContextParallel(2),
    "averaging": hr.ParameterAveraging(3, period=2),
    "averaging pipelines": hr.Hybrid(hr.ParameterAveraging(2, 2), hr.Pipeline(2, micro_batches=2)),
    "central storage": hr.CentralStorage(2),
    "downpour": hr.Downpour(1, servers=1, push_every=2, fetch_every=2, overlap=False),
    "four levels": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.Pipeline(2, micro_batches=2), hr.TensorParallel(2)),
    "experts": hr.ExpertParallel(2),
    "fully sharded": hr.FullySharded(4),
    "fully sharded, kept": hr.FullySharded(2, reshard_after_forward=False),
    "gossip": hr.Gossip(3),
    "mirrored": hr.Mirrored(3),
    "mirrored experts": hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2)),
    "mirrored pipelines": hr.Hybrid(hr.Mirrored(4), hr.Pipeline(2, micro_batches=2)),
    "mirrored slices": hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
    "one device": hr.OneDevice(),
    "parameter server": hr.ParameterServer(2, servers=1, staleness_bound=0),
    "pipeline": hr.Pipeline(2, micro_batches=4),
    "sharded experts": hr.Hybrid(hr.FullySharded(2), hr.ExpertParallel(2)),
    "sharded replicas": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    "sharded rings": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.ContextParallel(2)),
    "sharded slices": hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)),
    "sharded stages": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2, micro_batches=2)),
    "sliced stages": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, micro_batches=2), hr.TensorParallel(2)),
    "tensor parallel": hr.TensorParallel(4),
    "unconnected": hr.Unconnected(2),
}
USUAL = (
    *(
        "attending ring",
        "averaging",
        "central storage",
        "downpour",
        "experts",
        "fully sharded",
        "gossip",
        "mirrored",
        "mirrored slices",
    ),
    *("parameter server", "pipeline", "tensor parallel"),
)
"""What the usual run has: each way to exchange, and one hybrid. Others' bytes are sums of those of their levels."""


IN_PROCESSES = ("experts", "mirrored", "tensor parallel")
"""What the usual run has in processes: threads exchange what layers and experts need in another way.

Ranks of the others count as many bytes in threads, which take a fifth of the time.
"""
CASES = [
    pytest.param(name, threads, marks=[pytest.mark.full] * (name not in USUAL or threads == (name in IN_PROCESSES)))
    for name in sorted(CHOSEN)
    for threads in (False, True)
    if not threads or (name in USUAL and name not in IN_PROCESSES)
]


def model() -> nn.Module:
    torch.manual_seed(0)
    wide = [part for _ in range(3) for part in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*wide, nn.Linear(256, 128))


class Attending(nn.Module):
    """Reads 8 tokens of 32 numbers, and has layers that are no blocks; `mixture` takes the place of linear layers."""

    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.mixed, self.head = nn.Linear(32, 96), nn.Linear(32, 128)
        self.blocks = nn.Sequential(Routed(mixture), Routed(mixture))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mixed(x).chunk(3, -1)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(self.blocks(seen))


class Routed(nn.Module):
    """Sends each token to two of four experts, which follow from its place."""

    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4 if mixture else 1))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.experts) < 2:
            return x + self.experts[0](x)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = [number, (number + 1) % 4, 4 + number, 4 + (number + 1) % 4]
            made = made.index_add(1, torch.tensor(places), expert(x[:, places]))
        return x + made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attending ring": functools.partial(Attending, False),
    "experts": functools.partial(Attending, True),
    "mirrored experts": functools.partial(Attending, True),
    "sharded experts": functools.partial(Attending, True),
    "sharded rings": functools.partial(Attending, False),
}
"""Of strategies that divide something that the other model does not have."""


def job(steps: int, name: str = "") -> hr.Job:
    inputs = torch.randn(4 * BATCH, 256, generator=torch.Generator().manual_seed(0))
    labels, task = torch.arange(4 * BATCH) % 128, hr.tasks.multiclass(128)
    if name in MODELS:
        inputs, labels = inputs.unflatten(1, (8, 32)), labels[:, None].expand(-1, 8).contiguous()
        task = hr.tasks.language_model(shifted=False)
    return hr.Job(
        model=MODELS.get(name, model),
        task=task,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(inputs, labels),
        global_batch_size=BATCH,
        steps=steps,
    )


@functools.cache
def profiled(name: str) -> ModelSpec:
    return hr.profile(job(4, name), batch_sizes=[], seconds=0.01)


def counted(name: str, steps: int, run_dir: Path, threads: bool) -> float:
    """Returns the bytes of a rank of a run, on average."""
    strategy = CHOSEN[name]
    engine = hr.ThreadEngine() if threads else None
    run = hr.fit(job(steps, name), strategy, engine=engine, run_dir=run_dir, checkpoints=False, check=False)
    return mean(event.moved_bytes for event in run.events if isinstance(event, WorkerEnded))


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize(("name", "threads"), CASES)
def test_bytes_of_a_step_are_those_that_ranks_count(name: str, threads: bool, tmp_path: Path) -> None:
    strategy, profile = CHOSEN[name], profiled(name if name in MODELS else "")
    # What ranks exchange before the first step and after the last is not a step's.
    few, many = (counted(name, steps, tmp_path / str(steps), threads) for steps in STEPS)
    cluster = Cluster((Host("here", 16, 64_000_000_000),))
    predicted = hr.simulate(
        profile, cluster, strategy, global_batch_size=BATCH, assumptions=hr.Assumptions(steps=STEPS[1] - STEPS[0])
    )
    assert (many - few) / (STEPS[1] - STEPS[0]) == pytest.approx(predicted.moved_bytes, rel=0.02)
