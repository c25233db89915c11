"""The GPUs' own exchange, as far as one GPU can show it: NCCL of one rank, gloo between two processes on one GPU."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import headrace as hr
from headrace.collectives.accelerators.torch_distributed import TorchDistributed
from headrace.devices import DEVICES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def group_of(folder: Path, rank: int = 0, world: int = 1) -> TorchDistributed:
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    return TorchDistributed(store, rank, world, "cuda:0", 60.0)


def every_call(group: TorchDistributed, world: int, rank: int) -> None:
    """Holds each collective to what it must give."""
    cuda = torch.device("cuda", 0)
    tensor = torch.arange(5.0, device=cuda) + rank
    wait = group.start_all_reduce(tensor)
    wait()
    assert tensor.tolist() == [sum(place + other for other in range(world)) for place in range(5)]
    tensor = torch.full((3,), float(rank), device=cuda)
    group.broadcast(tensor)
    assert tensor.tolist() == [0.0] * 3
    own = torch.full((4,), rank, dtype=torch.uint8, device=cuda)
    assert group.gather(own).tolist() == [[other] * 4 for other in range(world)]
    assert group.sum([1.5, float(rank)]) == [1.5 * world, float(sum(range(world)))]
    group.barrier()


def test_each_collective_over_nccl_and_a_clean_end(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        group = group_of(tmp_path / name)
        every_call(group, 1, 0)
        pieces = torch.arange(3, dtype=torch.uint8, device="cuda").view(1, 3)
        assert torch.equal(group.all_to_all(pieces), pieces)
        group.close()
    assert not dist.is_initialized()


def test_a_group_of_the_users_own_stays(tmp_path: Path) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = group_of(tmp_path)
        every_call(group, 1, 0)
        group.close()
        tensor = torch.ones(2, device="cuda")
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_a_process_trains_as_often_as_it_likes() -> None:
    x = torch.randn(32, 4, dtype=torch.float64)
    job = hr.Job(
        model=nn.Linear(4, 3).double(),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(x, (x.sum(1) > 0).long()),
        global_batch_size=8,
    )
    models = [hr.fit(job, hr.Mirrored(1), device="cuda", check=False).model for _ in range(3)]
    for model in models[1:]:
        assert torch.equal(model.weight, models[0].weight)


def on_one_gpu(folder: Path, rank: int, world: int) -> None:
    """What one of several processes on a GPU does: NCCL takes one, so gloo carries what lies there."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("gloo_near", create, devices=["cuda"])
    DEVICES["cuda"] = dataclasses.replace(DEVICES["cuda"], backend="gloo_near", binds=False)
    group = group_of(folder, rank, world)
    tensor = torch.full((1000,), float(rank + 1), device="cuda")
    group.start_all_reduce(tensor)()
    assert tensor.tolist() == [3.0] * 1000
    tensor = torch.full((3,), float(rank), device="cuda")
    group.broadcast(tensor)
    assert tensor.tolist() == [0.0] * 3
    assert group.sum([1.5, float(rank)]) == [3.0, 1.0]
    group.close()


def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=on_one_gpu, args=(tmp_path, rank, 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
