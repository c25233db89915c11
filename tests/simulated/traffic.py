"""A program that trains one model by several strategies, so that a test can count what each has sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

import headrace as hr
from engine.ranks import say
from headrace.spec.events import WorkerEnded
from simulated.accelerator import on_device
from simulated.cells import CELLS

__all__ = ["PARAMETERS", "ROUNDS", "main"]

ROUNDS, BATCH, WIDTH = 6, 8, 256
PARAMETERS = 64 * WIDTH + WIDTH + WIDTH * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def main(names: Sequence[str], workers: int, encrypt: bool) -> None:
    """Trains by each strategy, and says when it began and ended."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    inputs = torch.randn(BATCH * ROUNDS, 64)
    job = hr.Job(
        model=wide,
        loss=partial(on_device, squared),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=(inputs, inputs[:, :8].contiguous()),
        global_batch_size=BATCH,
        epochs=1,
    )
    for name in names:
        began = time.monotonic()
        run = hr.fit(job, CELLS[name].make(workers), device="fake", check=False, encrypt=encrypt)
        moved = {event.rank: event.moved_bytes for event in run.events if isinstance(event, WorkerEnded)}
        say(strategy=name, began=began, moved=moved)
