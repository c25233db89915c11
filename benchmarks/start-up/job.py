"""The mlp for a few steps."""

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
