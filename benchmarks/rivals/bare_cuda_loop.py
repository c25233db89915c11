"""The bare PyTorch loop on a GPU: `bare_cuda_loop.py mlp|cnn BATCH SECONDS`; prints examples/s.

The loss stays on the GPU, as in headrace: no step waits for it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import MODELS, examples


def main(workload: str, size: int, seconds: float) -> None:
    torch.manual_seed(0)
    model = MODELS[workload][0]().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = examples(workload, 4096)
    loss = nn.CrossEntropyLoss()
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
        loss(model(inputs.cuda(non_blocking=True)), target.cuda(non_blocking=True)).backward()
        optimizer.step()

    for _ in range(20):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    steps = 0
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        steps += 20
    print(size * steps / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
