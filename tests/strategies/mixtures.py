"""Mixtures of experts, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr

WIDTH = 6
ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.3)


class Expert(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide, self.back, self.dropout = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.back(F.silu(self.wide(x))))
        return y


class Routed(nn.Module):
    """Each token goes to `k` experts; one without tokens is left out. `capacity` is the most tokens of an expert."""

    def __init__(self, experts: int = 4, k: int = 2, capacity: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dropout) for _ in range(experts))
        self.k, self.capacity = k, capacity

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.k)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if self.capacity:
                row, place = row[: self.capacity], place[: self.capacity]
            if len(row):
                made.index_add_(0, row, expert(tokens[row]) * weights[row, place, None])
        return made.view_as(x)


class Blended(Routed):
    """Each token goes to all experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        parts = [weights[..., number, None] * expert(x) for number, expert in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class Chained(Routed):
    """What one expert gives decides what the next is called with."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class Scaled(Routed):
    """Multiplies by a buffer, counts in another, and replaces a third, before its experts are called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean + self.calls / 8
        return super().forward(x * self.scale * self.calls.sqrt() + x * self.mean)


class Aliased(Scaled):
    """Counts in a buffer that it has in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        # Of the type that the model gets, so that it stays the same tensor.
        self.calls = self.calls.double()
        self.counters = [self.calls]

    def forward(self, x: Tensor) -> Tensor:
        self.counters[0] += 1
        return Routed.forward(self, x * self.calls)


class Stacked(nn.Module):
    """Experts as rows of parameters, which have no others."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(experts, WIDTH) / 2)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        each = torch.einsum("tkoi,ti->tko", self.weight[index], tokens) + self.bias[index]
        return (each.tanh() * weights[..., None]).sum(1)


class OwnStacked(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router, self.rows = nn.Linear(WIDTH, experts), Stacked(experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        made: Tensor = self.rows(tokens, chosen, weights)
        return made.view_as(x)


class Reader(nn.Module):
    """Layers of experts over texts, one class a text."""

    def __init__(self, mixture: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(mixture() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)))
        y: Tensor = self.head(x).mean(1)
        return y


def reader(mixture: Callable[[], nn.Module] = Routed, change: Callable[[Reader], Any] | None = None) -> Reader:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        model = Reader(mixture).double()
    if change:
        change(model)
    return model


def read(
    mixture: Callable[[], nn.Module] = Routed,
    examples: int = 10,
    batch: int = 4,
    change: Callable[[Reader], Any] | None = None,
    **job: Any,
) -> hr.Job:
    """Returns a job whose last batch is short, so that a worker may have no example."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(examples, 3, 3, generator=generator, dtype=torch.float64)
    given: dict[str, Any] = {"epochs": 2, "optimizer": ADAMW, "loss": F.cross_entropy, **job}
    data = x, torch.randint(0, 3, (examples,), generator=generator)
    given |= {"data": data, "eval_data": data, "metrics": {"entropy": F.cross_entropy}}
    return hr.Job(model=partial(reader, mixture, change), global_batch_size=batch, **given)
