"""A program on simulated devices: what fully sharded training calls in a step, and how much memory it takes."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import headrace as hr
from engine.ranks import say
from fully_sharded.device_sizes import BATCH, ROUNDS, UNITS, WIDTH
from headrace.strategies import Strategy
from simulated.accelerator import on_device
from strategies.contract_runs import distance


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(UNITS)))


def watched(worker: hr.Worker) -> None:
    """Trains, and notes of each step when it began and ended on the host, and the most device memory that was held.

    And of the start, in a file of its own.
    """
    Path(f"start.{worker.rank}").write_text(str(torch.accelerator.max_memory_allocated()))
    for batch in worker.batches():
        torch.accelerator.reset_peak_memory_stats()
        began = time.monotonic()
        worker.step(batch)
        said = {"began": began, "ended": time.monotonic(), "peak": torch.accelerator.max_memory_allocated()}
        with Path(f"steps.{worker.rank}").open("a") as file:
            file.write(json.dumps(said) + "\n")


def main(strategy: Strategy) -> None:
    """Says how far the trained model is from that of one device."""
    inputs = torch.randn(BATCH * ROUNDS, WIDTH, dtype=torch.float64)
    job = hr.Job(
        model=blocks,
        loss=partial(on_device, F.mse_loss),
        optimizer=partial(torch.optim.AdamW, lr=0.01, foreach=False),
        data=(inputs, inputs.flip(1).contiguous()),
        global_batch_size=BATCH,
        epochs=1,
    )
    tensors = hr.launch(watched, job, strategy, device="fake").model.state_dict()
    one = hr.fit(job, hr.OneDevice(), device="cpu", engine=hr.ThreadEngine()).model.state_dict()
    say(apart=distance({name: each.cpu() for name, each in tensors.items()}, one))
