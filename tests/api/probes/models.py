"""Models whose state forward changes, each in its way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 4


class Codebook(nn.Module):
    """Its buffer follows the data in train mode."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.register_buffer("codes", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.lerp_(x.detach().mean(0), 0.1)
        out: Tensor = self.layer(x + self.codes)
        return out


class Examples(nn.Linear):
    """Counts examples."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(8, CLASSES)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        return super().forward(x)


class Target(nn.Module):
    """A copy that follows the weights: as a buffer that is replaced, or as a frozen parameter that is written to."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        copy = self.layer.weight.detach().clone()
        self.frozen = frozen
        if frozen:
            self.target = nn.Parameter(copy, requires_grad=False)
        else:
            self.register_buffer("target", copy)

    def forward(self, x: Tensor) -> Tensor:
        moved = 0.9 * self.target + 0.1 * self.layer.weight.detach()
        if self.frozen:
            self.target.data.copy_(moved)
        else:
            self.target = moved
        out: Tensor = self.layer(x) + F.linear(x, self.target)
        return out


class Cache(nn.Module):
    """Makes a table again in forward, which is not saved, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.register_buffer("table", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.arange(len(x), dtype=x.dtype)
        out: Tensor = self.layer(x) + self.table[:, None]
        return out


class Noisy(nn.Module):
    """Draws in eval mode, too, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + torch.randn_like(x))
        return out


class Counting(nn.Linear):
    """Counts something within a dictionary."""

    def __init__(self, moves: Callable[[Tensor], int]) -> None:
        super().__init__(8, CLASSES)
        self.moves, self.seen = moves, {"count": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["count"] += self.moves(x)
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = dict(state)
