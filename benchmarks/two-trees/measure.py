"""One figure of one tree: `measure.py CASE`, with its `src` and `benchmarks` on PYTHONPATH; the public API alone."""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from overhead_job import make_data, make_model
from torch import nn

import headrace as hr
from headrace.models import cnn, mlp

SECONDS, WARM = 5.0, 10


def middle_us(run: hr.Run) -> float:
    """Returns us a step: the mean from the 10th to the 50th percentile."""
    times = [event.time_s for event in run.events if event.kind == "stepped" and event.rank == 0]
    took = sorted(after - before for before, after in itertools.pairwise(times[WARM:]))
    middle = took[len(took) // 10 : len(took) // 2]
    return 1e6 * statistics.fmean(middle)


def one_device(workload: str, steps: int) -> float:
    job = hr.Job(
        model=functools.partial(make_model, workload),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*make_data(workload)).shuffle(),
        global_batch_size=64,
        steps=steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        return middle_us(hr.fit(job, hr.OneDevice(threads=1), run_dir=Path(folder) / "run"))


def mirrored(workload: str) -> float:
    """Returns us an example, in steady state."""
    make, shape = {"mlp": (mlp, (784,)), "cnn": (cnn, (3, 32, 32))}[workload]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, *shape, generator=generator)
    job = hr.Job(
        model=make,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(inputs, torch.randint(10, (4096,), generator=generator)),
        global_batch_size=128,
        steps=1_000_000,
    )
    run = hr.fit(job, hr.Mirrored(2), device="cpu", seconds=SECONDS)
    assert run.throughput is not None
    return 1e6 / run.throughput


def pipeline() -> float:
    generator = torch.Generator().manual_seed(0)
    layers = [functools.partial(nn.Linear, 1024, 1024), nn.ReLU] * 8
    job = hr.Job(
        model=lambda: nn.Sequential(*[layer() for layer in layers]),
        loss=nn.MSELoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=tuple(torch.randn(1024, 1024, generator=generator) for _ in range(2)),
        global_batch_size=256,
        steps=70,
    )
    return middle_us(hr.fit(job, hr.Pipeline(2, 4, "gpipe"), device="cpu"))


CASES = {
    "one_device, tiny": functools.partial(one_device, "tiny", 8000),
    "one_device, cnn": functools.partial(one_device, "cnn", 60),
    "mirrored, mlp": functools.partial(mirrored, "mlp"),
    "mirrored, cnn": functools.partial(mirrored, "cnn"),
    "pipeline, mlp": pipeline,
}

if __name__ == "__main__":
    print(CASES[sys.argv[1]]())
