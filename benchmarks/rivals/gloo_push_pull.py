"""A push and a pull over gloo's send and receive: `gloo_push_pull.py ELEMENTS`; prints ms."""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORKER, SERVER = 0, 1


def run(rank: int, elements: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    repeats = 3 + (1000 if elements < 1_000_000 else 20)
    gradient, parameters = torch.ones(elements), torch.zeros(elements, requires_grad=rank == SERVER)
    if rank == SERVER:
        optimizer = torch.optim.SGD([parameters], lr=0.1)
        for _ in range(repeats):
            dist.recv(gradient, WORKER)
            parameters.grad = gradient
            optimizer.step()
            dist.send(parameters.detach(), WORKER)
    else:
        took = []
        for _ in range(repeats):
            began = time.perf_counter()
            dist.send(gradient, SERVER)
            dist.recv(parameters, SERVER)
            took.append(time.perf_counter() - began)
        print(1e3 * statistics.fmean(took[3:]), flush=True)
    dist.barrier()
    # gloo aborts now and then when its process group is taken down.
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(run, args=(int(sys.argv[1]), 29500 + os.getpid() % 1000), nprocs=2)
