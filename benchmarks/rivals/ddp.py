"""torch's DistributedDataParallel over gloo, one thread each: `ddp.py WORKERS mlp|cnn SECONDS [fsdp]`; prints ex./s.

With 1 worker it is the bare loop: two of them at once are the ceiling, one with all threads what a user of one
machine would pick (`THREADS` and `BATCH` in the environment). With `FRESH` it takes other examples in every step, as
training does, and not one batch again and again. With `DEVICE=cuda` each process has a GPU, and the backend is nccl.
With `fsdp` it is torch's fully_shard of each layer and of the rest instead.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import EXAMPLES_A_WORKER, MODELS, examples


def fresh(workload: str, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches of a data set in memory, in another order in every epoch."""
    x, y = examples(workload, 4096)
    while True:
        for index in torch.randperm(len(x)).split(batch):
            yield x.index_select(0, index), y.index_select(0, index)


def sharded(model: nn.Module) -> nn.Module:
    """Returns the model, each of its layers with parameters a unit."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def train(rank: int, workers: int, workload: str, seconds: float, port: int, shards: bool = False) -> None:
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    batch = int(os.environ.get("BATCH", str(EXAMPLES_A_WORKER)))
    torch.manual_seed(0)
    cuda = os.environ.get("DEVICE") == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    model: nn.Module = MODELS[workload][0]().to(device)
    if workers > 1:
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers
        )
        model = sharded(model) if shards else DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss()
    batches = fresh(workload, batch) if "FRESH" in os.environ else itertools.repeat(examples(workload, batch))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        loss(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True)).backward()
        optimizer.step()

    for _ in range(10):
        step()
    began = time.perf_counter()
    steps = 0
    going = torch.ones(1, device=device)
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
        mp.spawn(train, args=(count, name, length, 29500 + os.getpid() % 1000, "fsdp" in sys.argv), nprocs=count)
