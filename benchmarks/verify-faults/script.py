"""Plain scripts of every sort, for `headrace verify script.py KIND`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import headrace as hr

KIND = sys.argv[1]
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class ByTurns(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(24, ())) for _ in range(24))

    def __len__(self) -> int:
        return 24


def halved(examples: list[Any]) -> list[Tensor]:
    """A collate function that leaves out every fifth example, and scales the others."""
    kept = [example for example in examples if float(example[1]) > -0.8] or examples
    inputs, targets = (torch.stack(each) for each in zip(*kept, strict=True))
    return [inputs / 2, targets]


normal = nn.BatchNorm1d(6) if KIND == "batch norm" else nn.Tanh()
model = nn.Sequential(nn.Linear(4, 6), normal, nn.Linear(6, 1))
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
more: dict[str, Any] = {"sampler": ByTurns()} if KIND == "sampler" else {"shuffle": True}
loader = DataLoader(data, batch_size=9, collate_fn=halved if KIND == "collate" else None, **more)
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if KIND == "lbfgs":
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
model[0].requires_grad_(KIND != "freezing")
reduction = "sum" if KIND == "sum" else None
model, optimizer, loader = hr.setup(
    model, optimizer, loader, "central_storage" if KIND == "central" else "mirrored", reduction=reduction
)
criterion = nn.MSELoss(reduction=reduction or "mean")


def step(inputs: Tensor, targets: Tensor, factor: float) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        for _ in range(2):
            loss = criterion(model(inputs), targets) * factor
            loss.backward()
        return loss

    if KIND == "lbfgs":
        optimizer.step(closure)
    else:
        closure()
        if KIND == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


for _ in range(100):
    for inputs, targets in loader:
        step(inputs, targets, 0.02 if KIND == "sum" else 0.5)
        model[0].requires_grad_(True)
        model[2].requires_grad_(KIND != "freezing")
