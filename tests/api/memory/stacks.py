"""A stack of equal layers whose memory can be added up by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr

WIDTH, LAYERS = 256, 4
PARAMETERS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def blocks() -> nn.Module:
    """Pairs of layers that are cut, of as many parameters."""
    half = LAYERS // 2
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(half))
    )


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def job(
    model: Callable[[], nn.Module] | nn.Module = stack,
    optimizer: Any = torch.optim.Adam,
    batch: int = 64,
    **options: Any,
) -> hr.Job:
    return hr.Job(
        model=model,
        loss=squares,
        optimizer=partial(optimizer, lr=1e-3),
        data=(torch.ones(2 * batch, WIDTH), torch.zeros(2 * batch, WIDTH)),
        global_batch_size=batch,
        steps=2,
        options=hr.Options(**options),
    )


def near(found: int, expected: int) -> bool:
    """Within the pages and the counters that a hand does not add up."""
    return abs(found - expected) <= 0.02 * expected + 1024
