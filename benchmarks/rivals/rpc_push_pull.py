"""A push and a pull over torch RPC: `rpc_push_pull.py ELEMENTS`; prints ms."""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor

held: list[torch.optim.Optimizer] = []


def push_pull(gradient: Tensor) -> Tensor:
    """Applies a gradient on the server; returns the parameters."""
    if not held:
        held.append(torch.optim.SGD([torch.zeros(len(gradient), requires_grad=True)], lr=0.1))
    parameters: Tensor = held[0].param_groups[0]["params"][0]
    parameters.grad = gradient
    held[0].step()
    return parameters.detach()


def run(rank: int, elements: int, port: int) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        gradient, took = torch.ones(elements), []
        for _ in range(3 + (1000 if elements < 1_000_000 else 20)):
            began = time.perf_counter()
            # What comes is the worker's own.
            rpc.rpc_sync("rank1", push_pull, (gradient,))
            took.append(time.perf_counter() - began)
        print(1e3 * statistics.fmean(took[3:]), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(int(sys.argv[1]), 29500 + os.getpid() % 1000), nprocs=2)
