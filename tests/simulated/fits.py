"""A program that trains again and again in one process, at times in vain, and says what each time leaves behind."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

import headrace as hr
from engine.ranks import say
from simulated.accelerator import live_blocks, on_device
from simulated.nccl import FakeNccl
from strategies.contract_models import COUNTS, MODELS

__all__ = ["main"]

STRATEGIES: Sequence[hr.strategies.Strategy] = (
    hr.Mirrored(),
    hr.FullySharded(),
    hr.LocalSGD(period=2),
    hr.Hybrid(hr.Mirrored(1), hr.TensorParallel(2)),
)


def held() -> dict[str, object]:
    """What this process holds now."""
    gc.collect()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": descriptors(),
        "groups": sum(type(each) is FakeNccl for each in gc.get_objects()),
        "blocks": live_blocks(),
        "bytes": torch.accelerator.memory_allocated(torch.accelerator.current_device_index()),
    }


def descriptors() -> list[str]:
    """What each open descriptor is of, without its number."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        # One was the list itself.
        with suppress(FileNotFoundError):
            found.append(re.sub(r":.*", "", os.readlink(path)))
    return sorted(found)


def explode(worker: hr.Worker) -> None:
    """A loop whose last worker fails while the others wait for it."""
    for batch in worker.batches():
        if worker.round == 1 and worker.rank == worker.world - 1:
            raise ValueError("this worker fails in its second round")
        worker.step(batch)


def misshape(worker: hr.Worker) -> None:
    """A loop whose last worker fails within a forward, with a graph begun."""
    for inputs, target in worker.batches():
        bad = worker.round == 1 and worker.rank == worker.world - 1
        worker.step((inputs[:, :-1] if bad else inputs, target))


FAILURES = (explode, misshape)


def main(times: int, failing: Sequence[int]) -> None:
    """Trains so many times, of which some fail, one way and the other; says what is held after each."""
    torch.set_num_threads(1)
    case = MODELS["mlp"].job(COUNTS["tiny"])
    job = dataclasses.replace(case, loss=partial(on_device, case.loss), epochs=1)
    for turn in range(times):
        strategy = STRATEGIES[turn % len(STRATEGIES)]
        failure = FAILURES[list(failing).index(turn) % 2] if turn in failing else None
        begin = partial(hr.launch, failure) if failure else hr.fit
        error = ""
        try:
            begin(job, strategy, device="fake", check=False)
        except (ValueError, RuntimeError, hr.errors.HeadraceError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        say(turn=turn, strategy=strategy.name, error=error, **held())
