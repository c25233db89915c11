"""What the stand-in for NCCL does, as programs of two ranks say it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from engine.ranks import say
from simulated.accelerator import NAME, counted
from simulated.nccl import FAULTS, FakeNccl
from simulated.scenarios import FIRST, raised


def pair(store: str) -> None:
    """Of two ranks, each with a device."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    device, found = torch.device(NAME, rank), dist.FileStore(store, 2)

    def group(name: str, timeout_s: float = 60) -> FakeNccl:
        return FakeNccl(dist.PrefixStore(name, found), rank, 2, timedelta(seconds=timeout_s))

    say(sums=sums(group("sums"), device, rank))
    say(refused=refused(group("refused"), device))
    say(apart=apart(group("apart"), device, rank))
    say(shared=raised(lambda: group("shared").allreduce([torch.ones(1, device=FIRST)])))
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    say(faults=faults(group, device, rank))


def surface() -> None:
    """What a program could call here, and not of NCCL's own group."""
    own = {name for name in vars(FakeNccl) if callable(getattr(FakeNccl, name)) and not name.startswith("__")}
    private = {name for name in own if name.startswith("_") and name not in dir(Backend)}
    say(more=sorted(own - private - set(dir(Backend))))


def sums(group: FakeNccl, device: torch.device, rank: int) -> dict[str, Any]:
    own = torch.arange(4.0, device=device) + rank
    with counted() as rise:
        work = group.allreduce([own])
        early = raised(lambda: own + 1)
        work.wait()
        total = own * 1
    every, part = torch.empty(2, 4, device=device), torch.empty(2, device=device)
    group._allgather_base(every, own).wait()
    group._reduce_scatter_base(part, own).wait()
    turned, other = torch.empty_like(own), torch.empty(1, device=device)
    mine = torch.full((4,), float(rank), device=device)
    group.alltoall_base(turned, mine, [], []).wait()
    group._start_coalescing()
    group.send([torch.full((1,), float(rank), device=device)], 1 - rank, 0)
    group.recv([other], 1 - rank, 0)
    group._end_coalescing().wait()
    group.barrier().wait()
    found = {"all": total, "every": every, "part": part, "turned": turned, "other": other}
    group.shutdown()
    return {"early": early, "waits": rise["waits"], **{name: tensor.tolist() for name, tensor in found.items()}}


def refused(group: FakeNccl, device: torch.device) -> list[str]:
    bad = torch.ones(2), torch.ones(2, 3, device=device).t(), torch.ones(2, dtype=torch.int16, device=device)
    said = [raised(lambda tensor=tensor: group.allreduce([tensor])) for tensor in bad]
    group.shutdown()
    return said


def apart(group: FakeNccl, device: torch.device, rank: int) -> str:
    own = torch.ones(4, device=device)

    def act() -> None:
        work = group._allgather_base(torch.empty(8, device=device), own) if rank else group.allreduce([own])
        work.wait()
        (own + 1).tolist()

    said = raised(act)
    group.abort()
    return said


def faults(group: Callable[..., FakeNccl], device: torch.device, rank: int) -> dict[str, Any]:
    """A rank that is late; a call that never ends, until its time is over, and until it is aborted."""
    found: dict[str, Any] = {}
    own = torch.ones(2, device=device)
    FAULTS.append({"rank": 1, "call": "all_reduce", "at": 0, "do": "delay", "seconds": 0.3})
    late = group("late")
    work = late.allreduce([own])
    found["at once"] = work.is_completed()
    work.wait()
    found["late"] = own.tolist()
    late.shutdown()
    FAULTS[:] = [{"rank": 1, "call": "broadcast", "do": "never"}]
    never = group("never", 1.0)
    options = dist.BroadcastOptions()
    options.rootRank = 1
    work = never.broadcast([torch.ones(2, device=device)], options)
    work.ended.wait(30)
    found["never"] = raised(work.wait)
    never.abort()
    aborted = group("aborted")
    work = aborted.broadcast([torch.ones(2, device=device)], options)
    aborted.abort()
    found["aborted"] = raised(work.wait)
    return found
