"""The mlp for a few steps, of torch's own layers, and of a class."""

import dataclasses
import functools

import torch
from torch import nn

import headrace as hr

job = hr.Job(
    model=lambda: nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)),
    task=hr.tasks.multiclass(10),
    optimizer=functools.partial(torch.optim.SGD, lr=0.01),
    data=(torch.randn(1280, 784), torch.randint(10, (1280,))),
    global_batch_size=128,
    steps=3,
)


class Mlp(nn.Module):
    """The same layers in a class of the program's own, which the checks before the start must try."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(784, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.third(torch.relu(self.second(torch.relu(self.first(x)))))
        return output


own = dataclasses.replace(job, model=Mlp)
