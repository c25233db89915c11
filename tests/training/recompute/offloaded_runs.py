"""A program on a simulated device: gradients with what forward keeps on the host, beside the same with it there."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.ranks import say
from headrace.training.recompute.offloaded import OffloadedForward
from simulated.accelerator import NAME, counted


class InPlace(nn.Module):
    """Writes to what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.first(x))
        made = self.second(made * made)
        made.mul_(2)
        return functional.relu_(made)


class Tied(nn.Module):
    """Uses a parameter twice, once as a view, and a tensor that repeats its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.table(x))
        made = made * torch.ones(1, 1, 64, dtype=made.dtype, device=made.device).expand(made.shape)
        return made @ self.table.weight.T


class LastChannels(nn.Module):
    """Keeps images in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(torch.tanh(self.first(x.to(memory_format=torch.channels_last))))
        return made.flatten(1)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    return [each.cpu() for each in found]


def main() -> None:
    torch.manual_seed(0)
    cases = (
        (InPlace(), torch.randn(128, 64, dtype=torch.float64)),
        (Tied(), torch.randint(0, 50, (16, 20))),
        (LastChannels(), torch.randn(4, 3, 12, 12, dtype=torch.float64)),
    )
    for module, x in cases:
        there = module.double().to(NAME)
        offloaded = copy.deepcopy(there)
        OffloadedForward(offloaded)
        plain = gradients(there, x.to(NAME))
        with counted() as rise:
            found = gradients(offloaded, x.to(NAME))
        same = all(map(torch.equal, plain, found))
        say(name=type(module).__name__, same=same, copies=rise["pinned_reads"], faults=rise["faults"])
