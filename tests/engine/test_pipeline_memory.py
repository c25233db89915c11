"""What fits on no device fits on two: memory is measured, of processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import WorkerEnded

LIMIT_BYTES = 256 << 20
EXAMPLES = 32768


def deep() -> nn.Module:
    """Layers of 16 MiB of activations each, at `EXAMPLES`: those of one device take 330 MB."""
    blocks = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh(), nn.Sigmoid())]
    return nn.Sequential(*blocks, nn.Linear(128, 4))


def peak_bytes(engine: LocalEngine, model: object, strategy: hr.Strategy, examples: int) -> int:
    """Returns the most that a worker's process has taken."""
    job = hr.Job(
        model=model,
        task=hr.tasks.multiclass(4),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=hr.data.from_arrays(torch.randn(examples, 128), torch.randint(0, 4, (examples,))),
        global_batch_size=examples,
        steps=1,
    )
    run = hr.fit(job, strategy, device="cpu", engine=engine)
    return max(event.peak_memory_bytes for event in run.events if isinstance(event, WorkerEnded))


@pytest.mark.slow
def test_two_stages_train_under_a_limit_that_one_device_exceeds(engine: LocalEngine) -> None:
    # What a process takes that does next to nothing is what it begins with.
    start = peak_bytes(engine, partial(nn.Linear, 128, 4), hr.OneDevice(), 64)
    whole = peak_bytes(engine, deep, hr.OneDevice(), EXAMPLES) - start
    stage = peak_bytes(engine, deep, hr.Pipeline(stages=2, micro_batches=8), EXAMPLES) - start
    assert stage < LIMIT_BYTES < whole, f"a stage {stage:,}, one device {whole:,}"
