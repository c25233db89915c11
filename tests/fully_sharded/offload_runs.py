"""Programs on simulated devices: fully sharded training whose parts, and the update, are in host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from engine.ranks import say
from headrace.strategies import Strategy
from simulated.accelerator import counted, on_device
from strategies.contract_runs import distance

WIDTH, COUNT, BATCH = 96, 19, 8
"""The last batch of an epoch has three examples."""


class Scaled(nn.Module):
    """Blocks, a frozen one, and a scale, which has no rows to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)))
        self.blocks[1].requires_grad_(False)
        self.last = nn.Linear(WIDTH, 5, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.register_buffer("shift", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.blocks(x) + self.shift)) * self.scale
        return made


def job_of(**options: Any) -> hr.Job:
    torch.manual_seed(5)
    data = torch.randn(COUNT, WIDTH, dtype=torch.float64), torch.randn(COUNT, 5, dtype=torch.float64)
    return hr.Job(
        model=Scaled,
        loss=partial(on_device, F.mse_loss),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=data,
        eval_data=data,
        global_batch_size=BATCH,
        epochs=2,
        options=hr.Options(**options),
    )


def watched(name: str, worker: hr.Worker) -> None:
    """Trains, and notes what a device held between steps, and the most within one."""
    for batch in worker.batches():
        torch.accelerator.reset_peak_memory_stats()
        with counted() as rise:
            worker.step(batch)
        held, peak = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
        with Path(f"{name}.{worker.rank}").open("a") as file:
            file.write(json.dumps({"held": held, "peak": peak, **rise}) + "\n")


def tensors_of(run: hr.Run) -> dict[str, Tensor]:
    return {name: each.cpu() for name, each in run.model.state_dict().items()}


def one_device(job: hr.Job) -> dict[str, Tensor]:
    # On the CPU, which refuses it.
    job = replace(job, options=replace(job.options, recompute=job.options.again))
    return tensors_of(hr.fit(job, hr.OneDevice(), device="cpu", engine=hr.ThreadEngine(), check=False))


def apart(name: str, job: hr.Job, strategy: Strategy, **how: Any) -> None:
    """Says how far a run is from one device."""
    run = hr.launch(partial(watched, name), job, strategy, device="fake", **how)
    say(name=name, apart=distance(tensors_of(run), one_device(job)))


def options(strategies: dict[str, Strategy]) -> None:
    """Trains with clipping, accumulation and averages of weights."""
    whole = job_of()
    jobs = {
        "plain": whole,
        "clipped": job_of(clip_norm=0.05, on_nonfinite="skip"),
        "accumulated": job_of(accumulate=2, clip_value=0.01),
        "averaged": job_of(ema_decay=0.9, eval_every=1),
        "weighed": replace(job_of(), loss=partial(on_device, mean_loss)),
    }
    for kind, strategy in strategies.items():
        for name, job in jobs.items():
            apart(f"{kind} {name}", job, strategy)


def deep(**options: Any) -> hr.Job:
    """Eight layers of one size."""
    torch.manual_seed(6)
    data = torch.randn(16, 256, dtype=torch.float64), torch.randn(16, 256, dtype=torch.float64)
    return replace(
        job_of(**options), model=layers, data=data, eval_data=None, epochs=None, steps=3, global_batch_size=8
    )


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, dtype=torch.float64) for _ in range(8)))


def blocks() -> nn.Module:
    made = (nn.Sequential(nn.Linear(256, 256, dtype=torch.float64), nn.GELU()) for _ in range(6))
    return nn.Sequential(*made, nn.Linear(256, 5, dtype=torch.float64))


def activations(strategy: Strategy, recompute: str | None = None) -> None:
    """Trains with what forward keeps on the device, and on the host."""
    torch.manual_seed(6)
    data = torch.randn(2048, 256, dtype=torch.float64), torch.randn(2048, 5, dtype=torch.float64)
    for name, offload in (("kept", False), ("offloaded", True)):
        job = job_of(recompute=[*([recompute] if recompute else []), *["offload"] * offload] or None)
        job = replace(job, model=blocks, data=data, eval_data=None, epochs=None, steps=2, global_batch_size=1024)
        apart(f"{name} {recompute!r}", job, strategy)


def mean_loss(output: Tensor, target: Tensor) -> hr.Mean:
    weights = (target[:, :1] > 0).to(output.dtype) + 0.5
    return hr.Mean((weights * (output - target) ** 2).sum(), weights.sum())


def resumed(first: Strategy, second: Strategy) -> None:
    """Ends after an epoch, and goes on with another strategy."""
    job = job_of(clip_norm=0.1)
    begun = hr.fit(replace(job, epochs=1), first, device="fake", run_dir="begun")
    assert begun.status == "ok", begun.status
    run = hr.fit(job, second, device="fake", run_dir="begun", resume=True)
    say(apart=distance(tensors_of(run), one_device(job)))
