"""torch's fully_shard over gloo, one thread a process: `WORKERS WIDTH SECONDS [SLICES]`; prints examples/s.

With SLICES so many processes divide each layer by parallelize_module, and compute the same examples.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1] / "fully-sharded"))
from stack import EXAMPLES_A_WORKER, stack


def train(rank: int, workers: int, width: int, seconds: float, slices: int, port: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers)
    groups = workers // slices
    both = init_device_mesh("cpu", (groups, slices), mesh_dim_names=("parts", "slices"))
    mesh, model = both["parts"], stack(width)
    if slices > 1:
        for block in model:
            parallelize_module(block, both["slices"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # gloo has no average, which is the default.
    model.set_gradient_divide_factor(float(groups))
    model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    x, y = (torch.randn(slices * EXAMPLES_A_WORKER, width) for _ in range(2))
    going, steps = torch.ones(1), 0

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    for _ in range(3):
        step()
    began = time.perf_counter()
    while going:
        for _ in range(3):
            step()
        steps += 3
        going[0] = time.perf_counter() - began < seconds
        dist.broadcast(going, 0)
    took = time.perf_counter() - began
    if rank == 0:
        print(workers * EXAMPLES_A_WORKER * steps / took, flush=True)
    dist.barrier()
    # gloo aborts now and then when its process group is taken down.
    os._exit(0)


if __name__ == "__main__":
    count = int(sys.argv[1])
    sliced = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    mp.spawn(train, (count, int(sys.argv[2]), float(sys.argv[3]), sliced, 29500 + os.getpid() % 1000), nprocs=count)
