"""The two workloads, as jobs and as plain parts: communication-heavy and compute-heavy."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.models import cnn, mlp

MODELS = {"mlp": (mlp, (784,)), "cnn": (cnn, (3, 32, 32))}
EXAMPLES_A_WORKER = 64
LARGE = "resnet50"
"""Of torchvision, for accelerators: in bfloat16, channels last."""


def model(workload: str) -> Callable[[], nn.Module]:
    """Returns what makes the model of a workload."""
    if workload == LARGE:
        large: Callable[[], nn.Module] = importlib.import_module("torchvision.models").resnet50
        return large
    return MODELS[workload][0]


def examples(workload: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `(count, ...)` inputs and `(count,)` classes."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 224, 224) if workload == LARGE else MODELS[workload][1]
    return torch.randn(count, *shape, generator=generator), torch.randint(10, (count,), generator=generator)


def throughput(
    workload: str,
    strategy: hr.Strategy,
    workers: int,
    seconds: float,
    engine: LocalEngine,
    device: str | Sequence[str] = "cpu",
    options: hr.Options | None = None,
) -> float:
    """Trains for some seconds under a strategy; returns examples/s in steady state."""
    make, _ = MODELS[workload]
    job = hr.Job(
        model=make,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples(workload, 4096)),
        global_batch_size=EXAMPLES_A_WORKER * workers,
        steps=1_000_000,
        options=options or hr.Options(),
    )
    from headrace.api.fit import fit

    with tempfile.TemporaryDirectory() as folder:
        run = fit(job, strategy, device=device, run_dir=Path(folder) / "run", seconds=seconds, engine=engine)
        rate = run.throughput
    if rate is None:
        raise RuntimeError(f"{seconds} s are too short for {workload}")
    return rate


def endless() -> hr.Job:
    """Returns a job of tiny steps that runs until it is ended."""
    generator = torch.Generator().manual_seed(0)
    return hr.Job(
        model=functools.partial(nn.Linear, 64, 10),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=(torch.randn(4096, 64, generator=generator), torch.randint(0, 10, (4096,), generator=generator)),
        global_batch_size=256,
        epochs=1_000_000,
    )
