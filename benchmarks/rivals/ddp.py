"""torch's DistributedDataParallel over gloo, one thread a process: `ddp.py WORKERS mlp|cnn SECONDS`; prints examples/s.

With 1 worker it is the bare loop: two of them at once are the ceiling, one with all threads what a user of one
machine would pick (`THREADS` and `BATCH` in the environment).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import EXAMPLES_A_WORKER, MODELS, examples


def train(rank: int, workers: int, workload: str, seconds: float, port: int) -> None:
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    batch = int(os.environ.get("BATCH", str(EXAMPLES_A_WORKER)))
    torch.manual_seed(0)
    model: nn.Module = MODELS[workload][0]()
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers)
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = examples(workload, batch)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    for _ in range(10):
        step()
    began = time.perf_counter()
    steps = 0
    going = torch.ones(1)
    while going:
        for _ in range(10):
            step()
        steps += 10
        going[0] = time.perf_counter() - began < seconds
        if workers > 1:
            dist.broadcast(going, 0)
    took = time.perf_counter() - began
    if rank == 0:
        print(workers * batch * steps / took, flush=True)
    if workers > 1:
        dist.barrier()
        # gloo aborts now and then when its process group is taken down.
        os._exit(0)


if __name__ == "__main__":
    count, name, length = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if count == 1:
        train(0, 1, name, length, 0)
    else:
        mp.spawn(train, args=(count, name, length, 29500 + os.getpid() % 1000), nprocs=count)
