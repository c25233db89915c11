"""The bare PyTorch loop over a data set in memory: `bare_loop.py tiny|mlp|cnn STEPS`; prints us a step."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from overhead_job import make_data, make_model


def main(workload: str, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model(workload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = make_data(workload)
    loss = nn.CrossEntropyLoss()
    size = 64
    took = []
    order = torch.randperm(len(x))
    position = 0
    for _ in range(steps):
        began = time.perf_counter()
        if position + size > len(x):
            order, position = torch.randperm(len(x)), 0
        index = order[position : position + size]
        position += size
        optimizer.zero_grad()
        loss(model(x.index_select(0, index)), y.index_select(0, index)).backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
    took.sort()
    print(1e6 * sum(took[len(took) // 10 : len(took) // 2]) / (len(took) // 2 - len(took) // 10), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
