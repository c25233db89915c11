"""The bare PyTorch loop, in turns with another: `bare_loop_in_turns.py WORKLOAD FOLDER NAME OTHER BLOCK BLOCKS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from overhead_job import make_data, make_model
from turns import Turns


def main(workload: str, folder: Path, name: str, other: str, block: int, blocks: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Turns(make_model(workload), folder, name, other, block=block, blocks=blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = make_data(workload)
    loss = nn.CrossEntropyLoss()
    size = 64
    order = torch.randperm(len(x))
    position = 0
    for _ in range(block * blocks + 1):
        if position + size > len(x):
            order, position = torch.randperm(len(x)), 0
        index = order[position : position + size]
        position += size
        optimizer.zero_grad()
        loss(model(x.index_select(0, index)), y.index_select(0, index)).backward()
        optimizer.step()
    print(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
