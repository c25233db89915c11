"""Two stages on torch.distributed.pipelining over gloo: `torch_pipelining.py gpipe|1f1b MICRO_BATCHES STEPS`; in ms.

Eight times Linear(1024) and ReLU, 256 examples, one thread a stage; the median of the steps after the first ten.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

WIDTH, LAYERS, BATCH, WARM = 1024, 8, 256, 10


def run(rank: int, schedule: str, micro_batches: int, steps: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    layers = [layer for _ in range(LAYERS // 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    stage = PipelineStage(nn.Sequential(*layers), rank, 2, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    pipeline = kind(stage, micro_batches, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    starts = []
    for _ in range(WARM + steps + 1):
        starts.append(time.perf_counter())
        optimizer.zero_grad()
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=y, losses=[])
        optimizer.step()
    if rank == 0:
        took = [after - before for before, after in pairwise(starts[WARM:])]
        print(1e3 * statistics.median(took), flush=True)
    dist.barrier()
    # gloo aborts now and then when its process group is taken down.
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 29500 + os.getpid() % 1000), nprocs=2)
