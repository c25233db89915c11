"""all-reduce over gloo: `gloo_all_reduce.py WORKERS ELEMENTS`; prints ms."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank: int, workers: int, elements: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers)
    tensor = torch.ones(elements)
    repeats = 200 if elements < 1_000_000 else 10
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    took = time.perf_counter() - began
    if rank == 0:
        print(1e3 * took / repeats, flush=True)
    dist.barrier()
    # gloo aborts now and then when its process group is taken down.
    os._exit(0)


if __name__ == "__main__":
    count, length = int(sys.argv[1]), int(sys.argv[2])
    mp.spawn(run, args=(count, length, 29500 + os.getpid() % 1000), nprocs=count)
