"""A program: one rank of torch's own `fully_shard` over gloo, on its share of a job's batches; prints its weights."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import headrace as hr
from headrace.data import Loader, as_pipeline

ROUNDS = 4
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 4))


def job_of(precision: str) -> hr.Job:
    torch.manual_seed(7)
    dtype = torch.float64 if precision == "fp32" else torch.float32
    data = torch.randn(64, 12, dtype=dtype), torch.randint(0, 4, (64,))
    options = hr.Options(precision=precision)
    return hr.Job(
        model=model().to(dtype), loss=F.cross_entropy, optimizer=ADAMW, data=data, global_batch_size=16, steps=ROUNDS,
        options=options,
    )  # fmt: skip


def weights(module: nn.Module) -> dict[str, list[float]]:
    every: dict[str, Any] = dict(module.named_parameters())
    return {name: each.full_tensor().flatten().tolist() for name, each in every.items()}


def train(precision: str, rank: int, world: int) -> dict[str, list[float]]:
    job, module = job_of(precision), model()
    half = torch.bfloat16 if precision == "bf16" else None
    module.to(torch.float64 if half is None else torch.float32)
    inner, outer = (MixedPrecisionPolicy(half, output_dtype=half and torch.float32 if top else None) for top in (0, 1))
    for unit in (module[0], module[2], module[3], module[5]):  # type: ignore[index]
        fully_shard(unit, mp_policy=inner)
    fully_shard(module, mp_policy=outer)
    for each in module.modules():
        if isinstance(each, torch.distributed.fsdp.FSDPModule):
            each.set_force_sum_reduction_for_comms(True)
    optimizer = job.optimizer(module.parameters())
    loader = Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, (1,) * world, rank)
    for share in islice(loader.rounds(), ROUNDS):
        optimizer.zero_grad()
        inputs, target = share.batch
        F.cross_entropy(module(inputs), target).backward()
        optimizer.step()
    return weights(module)


if __name__ == "__main__":
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
    sys.stdout.write(json.dumps({precision: train(precision, rank, world) for precision in ("fp32", "bf16")}) + "\n")
    dist.destroy_process_group()
