"""The bare PyTorch loop on a device: `bare_device_loop.py DEVICE mlp|cnn|resnet50 BATCH SECONDS`; prints examples/s.

The loss stays on the device, as in headrace: no step waits for it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import LARGE, examples, model


def main(device: str, workload: str, size: int, seconds: float) -> None:
    torch.manual_seed(0)
    large = workload == LARGE
    module = model(workload)().to(device)
    if large:
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, y = examples(workload, 512 if large else 4096)
    loss = nn.CrossEntropyLoss()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    order = torch.randperm(len(x))
    position = 0

    def step() -> None:
        nonlocal order, position
        if position + size > len(x):
            order, position = torch.randperm(len(x)), 0
        index = order[position : position + size]
        position += size
        inputs, target = x.index_select(0, index), y.index_select(0, index)
        optimizer.zero_grad()
        inputs, target = inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)
        if large:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16, enabled=large):
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
