"""Small models and jobs, each difficult in its own way, that the contracts train.

Everything that is sent to a worker process lives here, because a process can import this file by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr

BATCH = 4
RARE_EVERY = 7
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.01)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SYNC = hr.Options(batch_norm="sync")


class Convolutional(nn.Module):
    """Two BatchNorm layers: statistics of the whole global batch, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            # Without a bias, whose gradient would be what rounding leaves of 0, and Adam takes any number for a sign.
            nn.Conv2d(1, 3, 2, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Conv2d(3, 2, 2, bias=False),
            nn.BatchNorm2d(2),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).flatten(1))
        return logits


def linear() -> nn.Module:
    return nn.Linear(4, 3)


class Partial(nn.Module):
    """Uses `extra` only where an example asks for it: some shares of a batch do, and some batches do not at all.

    Args:
        body: what every example goes through.
    """

    def __init__(self, body: Callable[[], nn.Module] = linear) -> None:
        super().__init__()
        self.body = body()
        self.extra = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        asks = asking(x)
        return output + asks[:, None] * self.extra(x) if asks.any() else output


def asking(x: Tensor) -> Tensor:
    return x[:, 0] > 5


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 3))


def vectors(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4)
    x[::RARE_EVERY, 0] = 6.0
    return x, torch.randint(0, 3, (count,))


def images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 4, 4), torch.randint(0, 3, (count,))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def heavy_classes(output: Tensor, target: Tensor) -> hr.Mean:
    weights = target.to(output.dtype)
    return hr.Mean((F.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())


@dataclass(frozen=True)
class Case:
    """A job but for its type, optimizer and number of examples.

    Attributes:
        model: builds it.
        data: count to (inputs, target).
        loss: as in a job.
        optimizer: unless the test takes another.
        options: as in a job.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]] = vectors
    loss: Callable[..., Any] = cross_entropy
    optimizer: Callable[..., Any] = SGD
    options: hr.Options = field(default_factory=hr.Options)

    def job(
        self, count: int, dtype: torch.dtype = torch.float64, optimizer: Callable[..., Any] | None = None
    ) -> hr.Job:
        """Returns the job; the same one for the same arguments."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            model = self.model().to(dtype)
            data, eval_data = (
                tuple(t.to(dtype) if t.is_floating_point() else t for t in self.data(n)) for n in (count, 7)
            )
        return hr.Job(
            model=model,
            loss=self.loss,
            optimizer=optimizer or self.optimizer,
            data=data,
            eval_data=eval_data,
            global_batch_size=BATCH,
            epochs=3,
            seed=3,
            options=self.options,
        )
