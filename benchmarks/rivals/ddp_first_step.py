"""A script for torchrun: DDP over gloo until the end of its first step, which it writes to a file as a time."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
model = nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(64, 784), torch.randint(10, (64,))
nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(time.monotonic()))
dist.barrier()
os._exit(0)
