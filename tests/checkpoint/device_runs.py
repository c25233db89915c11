"""Runs on simulated devices that save: `main` prints, by the name of a case, what came of it as JSON.

In a program of its own, because the simulated accelerator stays in a process for good.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from engine.ranks import say
from headrace.checkpoint import CheckpointFolder
from headrace.checkpoint.host_copies import Copied, HostCopies
from headrace.errors import HeadraceError
from headrace.spec.events import Notice, Saved
from headrace.worker.state import WorkerState
from simulated.accelerator import counted, cross_entropy

THREADS = hr.ThreadEngine()
PEAKS = "HEADRACE_TEST_PEAKS"
EVERY = hr.Checkpoints(every_steps=1, every_s=None, keep=99)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Net(nn.Module):
    """A weight of 4 dims, in any order of memory, and running statistics; forward may write to a parameter."""

    def __init__(self, writes: Callable[[int], bool] = lambda step: False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, 4, 4))
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self._writes, self._steps = writes, 0

    def forward(self, x: Tensor) -> Any:
        # Batches of the checks before a run are smaller.
        self._steps += self.training and len(x) >= 4
        if self.training and self._writes(self._steps):
            with torch.no_grad():
                self.head.weight.mul_(0.9)
        features = x.contiguous().flatten(1) @ self.weight.contiguous().flatten(1).T
        return self.head(torch.relu(self.norm(features)))


class Wide(nn.Module):
    """Many parameters and few activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 3))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def never(step: int) -> bool:
    return False


def always(step: int) -> bool:
    return True


def images() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, 2, 4, 4, generator=draw, dtype=torch.float64)
    return x, (x.sum((1, 2, 3)) > 0).long()


def small(writes: Callable[[int], bool] = never, **changes: Any) -> hr.Job:
    job = hr.Job(
        model=lambda: Net(writes).double(),
        loss=cross_entropy,
        optimizer=ADAMW,
        data=images(),
        global_batch_size=8,
        epochs=3,
    )
    return dataclasses.replace(job, **changes)


def wide(**changes: Any) -> hr.Job:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 256, generator=draw)
    job = hr.Job(
        model=Wide, loss=cross_entropy, optimizer=ADAMW, data=(x, (x.sum(1) > 0).long()), global_batch_size=8, epochs=6
    )
    return dataclasses.replace(job, **changes)


def saved(job: hr.Job, strategy: hr.Strategy, device: str, **more: Any) -> tuple[dict[int, Any], list[str]]:
    """Returns what a run's checkpoints hold, by step, and the notices of those that are not there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        asked = {"engine": THREADS, "check": False, "checkpoints": EVERY, "run_dir": path, **more}
        train = asked.pop("train", None)
        start = partial(hr.launch, train, job) if train else partial(hr.fit, job)
        run = start(strategy, device=device, **asked)
        found = CheckpointFolder(path / "checkpoints")
        opened = {step: found.open(step) for step in found.steps()}
        content = {
            step: {(rank, name): each for rank in one.ranks for name, each in one.read(rank).items()}
            for step, one in opened.items()
        }
        notices = [event.text for event in run.events if isinstance(event, Notice) and "no checkpoint" in event.text]
        assert any(isinstance(event, Saved) for event in run.events)
        return content, notices


def apart(job: hr.Job, strategy: hr.Strategy | None = None, **more: Any) -> dict[str, Any]:
    """Returns how far the checkpoints of a device are from those of CPUs, at most."""
    strategy = strategy or hr.OneDevice()
    there, notices = saved(job, strategy, "fake", **more)
    here, _ = saved(job, strategy, "cpu", **more)
    worst = 0.0
    for step, content in there.items():
        names = {key for key in content if not key[1].startswith("random/")}
        assert names == {key for key in here[step] if not key[1].startswith("random/")}
        for key in names:
            one, other = content[key].double(), here[step][key].double()
            worst = max(worst, float((one - other).abs().max()) if one.numel() else 0.0)
            assert one.shape == other.shape
            assert one.isfinite().all(), key
    return {"apart": worst, "steps": sorted(there), "notices": notices}


@contextmanager
def changed(owner: type, name: str, other: Any) -> Iterator[None]:
    """Puts another function into a class for a while."""
    whole = vars(owner)[name]
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, whole)


def late_saver() -> AbstractContextManager[None]:
    """Lets the saver's thread look for the copies late: it must not be what orders an update after them."""
    whole = Copied.wait

    def wait(self: Copied) -> bool:
        time.sleep(0.1)
        return whole(self)

    return changed(Copied, "wait", wait)


def waits_of_saving() -> dict[str, int]:
    """Returns what five checkpoints cost the threads of a run in waits, beside those of its saver."""
    with counted() as often:
        saved(small(), hr.OneDevice(), "fake")
    with counted() as once:
        saved(small(), hr.OneDevice(), "fake", checkpoints=hr.Checkpoints(every_steps=99, every_s=None))
    return {name: often[name] - once[name] for name in often}


def missing_wait() -> dict[str, str]:
    """Returns the error of a run whose updates do not wait for the copies."""
    with late_saver(), changed(HostCopies, "hold", _skip):
        try:
            saved(small(), hr.OneDevice(), "fake")
        except HeadraceError as error:
            return {"error": str(error)}
    return {"error": ""}


def _skip(self: HostCopies) -> None:
    self._last, self._late = None, True


def peak(job: hr.Job) -> dict[str, float]:
    """Returns the peaks of device memory of runs that save after each step and never, beside what was there before."""
    found = []
    for checkpoints in (False, EVERY):
        gc.collect()
        torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
        before = torch.fake.memory_allocated()  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory() as folder:
            asked: dict[str, Any] = {"run_dir": Path(folder) / "run", "checkpoints": checkpoints, "check": False}
            hr.fit(job, hr.OneDevice(), device="fake", engine=THREADS, **asked)
        found.append(torch.fake.max_memory_allocated() - before)  # type: ignore[attr-defined]
    return {"never": found[0], "often": found[1]}


def added(strategy: hr.Strategy) -> dict[str, float]:
    """Returns how much device memory the saves of a strategy's workers take at most, and what they had before."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[PEAKS] = folder
        asked: dict[str, Any] = {"run_dir": Path(folder) / "run", "checkpoints": EVERY, "check": False}
        hr.fit(wide(), strategy, device="fake", **asked)
        told = [map(int, each.read_text().split()) for each in Path(folder).glob("take-*")]
        del os.environ[PEAKS]
    before, peaks = zip(*told, strict=True)
    return {"before": max(before), "added": max(map(int.__sub__, peaks, before)), "saves": len(told)}


def _take(self: WorkerState, *asked: Any) -> Any:
    runtime = torch.fake  # type: ignore[attr-defined]
    before = runtime.memory_allocated()
    if PEAKS in os.environ:
        runtime.reset_peak_memory_stats()
    taken = _TAKE(self, *asked)
    if PEAKS in os.environ:
        told = Path(os.environ[PEAKS]) / f"take-{os.getpid()}-{asked[0]}"
        told.write_text(f"{before} {runtime.max_memory_allocated()}")
    return taken


# Workers are processes of their own, which import this file where the job names something of it.
_TAKE, WorkerState.take = WorkerState.take, _take  # type: ignore[method-assign]


SHARED: dict[str, Callable[[], hr.Strategy]] = {
    "mirrored": lambda: hr.Mirrored(2),
    "fully_sharded": lambda: hr.FullySharded(2),
    "tensor_parallel": lambda: hr.TensorParallel(2),
    "parameter_averaging": lambda: hr.ParameterAveraging(2, period=2),
    "gossip": lambda: hr.Gossip(2),
    "central_storage": lambda: hr.CentralStorage(2),
    "parameter_server": lambda: hr.ParameterServer(1, 1),
    "pipeline": lambda: hr.Pipeline(2, 2),
}
CASES: dict[str, Callable[[], Any]] = {
    "usual": lambda: apart(small()),
    "averages": lambda: apart(small(options=hr.Options(ema_decay=0.9))),
    "channels last": lambda: apart(small(options=hr.Options(memory_format="channels_last"))),
    "forward writes": lambda: apart(small(always)),
    "own loop": lambda: apart(small(), train=clamps),
    "waits": waits_of_saving,
    "missing wait": missing_wait,
    "peak": lambda: peak(wide()),
    "peak with averages": lambda: peak(wide(options=hr.Options(ema_decay=0.9))),
    **{
        f"content of {name}": partial(lambda make: apart(small(), make(), engine=None), each)
        for name, each in SHARED.items()
    },
    **{f"added by {name}": partial(lambda make: added(make()), each) for name, each in SHARED.items()},
}


def clamps(worker: hr.Worker) -> None:
    """A loop that writes to parameters between two steps, also where no version tells of it."""
    for batch in worker.batches():
        for parameter in worker.model.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        worker.step(batch)


def main(*names: str) -> None:
    with late_saver():
        for name in names or CASES:
            say(case=name, **CASES[name]())


if __name__ == "__main__":
    main(*sys.argv[1:])
