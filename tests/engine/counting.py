"""A job that counts how often each example was trained on."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor, nn

import headrace as hr
from engine.ranks import until

EXAMPLES = 96
BATCH = 16
EPOCHS = 30
HURRIED = 15


class Counter(nn.Module):
    """Its parameters count how often each example was trained on, if the learning rate is the batch.

    Args:
        awaited: a file. From the epoch `HURRIED` on, a batch takes half a second until it is there: so few epochs
            outlast what shall happen meanwhile, and are over soon after it.
    """

    def __init__(self, awaited: Path | None = None) -> None:
        super().__init__()
        self._awaited = awaited
        halves = (nn.Parameter(torch.zeros(EXAMPLES // 2, dtype=torch.float64)) for _ in range(2))
        self.low, self.high = halves

    def forward(self, inputs: Tensor) -> Tensor:
        if self._awaited is not None and self.count.mean() > HURRIED:
            until(self._awaited.exists, 0.5)
        return -inputs @ self.count

    @property
    def count(self) -> Tensor:
        return torch.cat([self.low, self.high])


def mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def counting_job(epochs: int = EPOCHS, **changes: object) -> hr.Job:
    inputs = torch.eye(EXAMPLES, dtype=torch.float64)
    given: dict[str, object] = {
        "model": Counter,
        "loss": mean,
        "optimizer": functools.partial(torch.optim.SGD, lr=float(BATCH)),
        "data": (inputs, torch.zeros(EXAMPLES)),
        "global_batch_size": BATCH,
        "epochs": epochs,
    }
    return hr.Job(**{**given, **changes})  # type: ignore[arg-type]
