"""The bare loop on a device: `bare_device_loop.py DEVICE mlp|cnn|resnet50|gpt2 BATCH SECONDS [ddp]`; prints examples/s.

Batches go from pinned buffers that are used again, and the loss stays on the device: no step waits for it. With `ddp`
the model is in torch's DistributedDataParallel, of one process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import GPT2, LARGE, examples, loss_of, model

BUFFERS = 3


def wrapped(module: nn.Module, cuda: bool) -> nn.Module:
    """Returns the module in DistributedDataParallel, of this process alone."""
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


class Staging:
    """Batches by way of pinned buffers, each of which is used again when its copy is done."""

    def __init__(self, device: str, x: torch.Tensor, y: torch.Tensor, size: int) -> None:
        self._device, self._data, self._next = device, (x, y), 0
        cuda = device == "cuda"
        self._buffers = [
            tuple(torch.empty(size, *each.shape[1:], dtype=each.dtype, pin_memory=cuda) for each in (x, y))
            for _ in range(BUFFERS)
        ]
        self._copied: list[Any] = [torch.cuda.Event() if cuda else None for _ in range(BUFFERS)]

    def __call__(self, index: torch.Tensor) -> list[torch.Tensor]:
        self._next = (self._next + 1) % BUFFERS
        buffers, copied = self._buffers[self._next], self._copied[self._next]
        if copied is None:
            return [each.index_select(0, index) for each in self._data]
        copied.synchronize()
        for each, buffer in zip(self._data, buffers, strict=True):
            torch.index_select(each, 0, index, out=buffer)
        placed = [buffer.to(self._device, non_blocking=True) for buffer in buffers]
        copied.record()
        return placed


def main(device: str, workload: str, size: int, seconds: float, ddp: bool) -> None:
    torch.manual_seed(0)
    large, half = workload == LARGE, workload in (LARGE, GPT2)
    module = model(workload)().to(device)
    if large:
        module = module.to(memory_format=torch.channels_last)
    if ddp:
        module = wrapped(module, device == "cuda")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, y = examples(workload, 512 if half else 4096)
    loss, batch = loss_of(workload), Staging(device, x, y, size)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    order = torch.randperm(len(x))
    position = 0

    def step() -> None:
        nonlocal order, position
        if position + size > len(x):
            order, position = torch.randperm(len(x)), 0
        inputs, target = batch(order[position : position + size])
        position += size
        optimizer.zero_grad()
        if large:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16, enabled=half):
            value = loss(module(inputs), target)
        value.backward()
        optimizer.step()

    for _ in range(20):
        step()
    wait()
    began = time.perf_counter()
    steps = 0
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            step()
        wait()
        steps += 20
    print(size * steps / (time.perf_counter() - began), flush=True)
    # A process group that is taken down may abort.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), "ddp" in sys.argv)
