"""One small job for each thing of a user's that must be carried to the workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import headrace as hr

draws = torch.Generator().manual_seed(1)
INPUTS = torch.randn(60, 4, generator=draws)
TARGETS = torch.randint(0, 3, (60,), generator=draws)


class Net(nn.Module):
    """A body, and a head."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), between(), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(inputs))
        return output


def masked() -> Net:
    """Gradients of two rows are masked by a hook of the parameter."""
    model = Net()
    mask = torch.ones(6, 4)
    mask[:2] = 0
    model.body[0].weight.register_hook(lambda gradient: gradient * mask)
    return model


class Drawn(Net):
    """An attribute that numpy draws in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = torch.from_numpy(np.random.randn(4, 4)).float()

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.sin(inputs @ self.angles))


class Codebook(Net):
    """A buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(inputs.mean(0), 0.1)
        return super().forward(inputs - self.mean)


def grouped(named: Any) -> torch.optim.Optimizer:
    """Two groups with learning rates of their own."""
    named = list(named)
    heads = [parameter for name, parameter in named if name.startswith("head")]
    rest = [parameter for name, parameter in named if not name.startswith("head")]
    return torch.optim.SGD([{"params": heads, "lr": 0.2}, {"params": rest}], lr=0.05, momentum=0.9)


def weighted(output: Tensor, target: Tensor) -> hr.Mean:
    """A mean by the weights of the classes, whose sum a share does not know."""
    weights = torch.tensor([0.1, 1.0, 10.0], dtype=output.dtype)[target]
    return hr.Mean((nn.functional.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())


KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "hooks": {"model": masked},
    "given hooks": {"model": masked()},
    "attributes": {"model": Drawn},
    "buffers": {"model": Codebook, "options": hr.Options(sync_buffers="mean")},
    "batch norm": {"model": functools.partial(Net, functools.partial(nn.BatchNorm1d, 6))},
    "synced batch norm": {
        "model": functools.partial(Net, functools.partial(nn.BatchNorm1d, 6)),
        "options": hr.Options(batch_norm="sync"),
    },
    "dropout": {"model": functools.partial(Net, functools.partial(nn.Dropout, 0.3))},
    "groups": {"optimizer": grouped},
    "adam": {"optimizer": functools.partial(torch.optim.Adam, lr=0.01)},
    "weights": {"task": None, "loss": weighted},
    "clip": {"options": hr.Options(clip_norm=0.1)},
    "clip value": {"options": hr.Options(clip_value=0.01)},
    "warmup": {"options": hr.Options(warmup=4)},
    "schedule": {
        "options": hr.Options(schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5))
    },
    "average": {"options": hr.Options(ema_decay=0.6)},
    "accumulate": {"options": hr.Options(accumulate=3)},
    "frozen": {"model": hr.frozen(Net, "body.*", until_epoch=1)},
}


def job(kind: str = "plain") -> hr.Job:
    parts: dict[str, Any] = {
        "model": Net,
        "task": hr.tasks.multiclass(3),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        **KINDS[kind],
    }
    data = INPUTS, TARGETS
    return hr.Job(data=data, eval_data=data, global_batch_size=10, epochs=3, seed=0, **parts)
