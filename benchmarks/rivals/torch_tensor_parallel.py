"""torch's parallelize_module (DTensor) over gloo with two ranks: `WIDTH STEPS`; prints ms a step."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1] / "tensor-parallel"))
from blocks import BATCH, blocks

WORLD = 2


def train(rank: int, width: int, steps: int, port: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    model = blocks(width)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    kinds = (ColwiseParallel, RowwiseParallel)
    parallelize_module(model, mesh, {name: kinds[index % 2]() for index, name in enumerate(linear)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)
    for step in range(steps + 5):
        if step == 5:
            began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        print(1e3 * (time.perf_counter() - began) / steps, flush=True)
    dist.barrier()
    # gloo aborts now and then when its process group is taken down.
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(train, args=(int(sys.argv[1]), int(sys.argv[2]), 29500 + os.getpid() % 1000), nprocs=WORLD)
