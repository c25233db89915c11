"""Runs on simulated devices that save: `main` prints, by the name of a case, what came of it as JSON.

In a program of its own, because the simulated accelerator stays in a process for good.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from engine.ranks import say
from headrace.checkpoint import CheckpointFolder
from headrace.checkpoint.host_copies import HostCopies
from headrace.spec.events import Notice, Saved
from simulated.accelerator import counted, cross_entropy

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


def late(step: int) -> bool:
    return step >= 4


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
        asked = {"engine": hr.ThreadEngine(), "check": False, "checkpoints": EVERY, "run_dir": path, **more}
        run = hr.fit(job, strategy, device=device, **asked)
        found = CheckpointFolder(path / "checkpoints")
        opened = {step: found.open(step) for step in found.steps()}
        content = {
            step: {(rank, name): each for rank in one.ranks for name, each in one.read(rank).items()}
            for step, one in opened.items()
        }
        notices = [event.text for event in run.events if isinstance(event, Notice) and "no checkpoint" in event.text]
        assert any(isinstance(event, Saved) for event in run.events)
        return content, notices


def apart(job: hr.Job, strategy: hr.Strategy | None = None, device: str = "fake") -> dict[str, Any]:
    """Returns how far the checkpoints of a device are from those of CPUs, at most."""
    strategy = strategy or hr.OneDevice()
    there, notices = saved(job, strategy, device)
    here, _ = saved(job, strategy, "cpu")
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


def stalls(monkey: Callable[[], Any] | None = None) -> dict[str, int]:
    """Returns the waits of a run that saves after each step, and of one that never does."""
    with counted() as often:
        saved(small(), hr.OneDevice(), "fake")
    with counted() as rarely:
        saved(small(), hr.OneDevice(), "fake", checkpoints=hr.Checkpoints(every_steps=99, every_s=None))
    return {name: often[name] - rarely[name] for name in often}


@contextmanager
def without_wait() -> Iterator[None]:
    """Lets an update begin while what it changes may still be copied."""
    whole = HostCopies.hold

    def hold(self: HostCopies) -> None:
        self._last = None

    HostCopies.hold = hold  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostCopies.hold = whole  # type: ignore[method-assign]


def missing_wait() -> dict[str, str]:
    """Returns the error of a run whose updates do not wait."""
    whole = HostCopies.__init__

    def begin(self: HostCopies, device: torch.device, late: bool) -> None:
        whole(self, device, late)
        self._late = True

    HostCopies.__init__ = begin  # type: ignore[method-assign]
    try:
        with without_wait():
            saved(small(), hr.OneDevice(), "fake")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        HostCopies.__init__ = whole  # type: ignore[method-assign]
    return {"error": ""}


def peaks(strategy: hr.Strategy, job: hr.Job) -> dict[str, float]:
    """Returns the peak of device memory of a run that saves after each step, over that of one that never does."""
    found = []
    for checkpoints in (False, EVERY):
        torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory() as folder:
            hr.fit(
                job, strategy, device="fake", engine=hr.ThreadEngine(), check=False, run_dir=Path(folder) / "run",
                checkpoints=checkpoints,
            )  # fmt: skip
        found.append(torch.fake.max_memory_allocated())  # type: ignore[attr-defined]
    return {"never": found[0], "often": found[1], "ratio": found[1] / found[0]}


CASES: dict[str, Callable[[], Any]] = {
    "usual": lambda: apart(small()),
    "averages": lambda: apart(small(options=hr.Options(ema_decay=0.9))),
    "channels last": lambda: apart(small(options=hr.Options(memory_format="channels_last"))),
    "forward writes": lambda: apart(small(always)),
    "forward begins to write": lambda: apart(small(late)),
    "stalls": stalls,
    "missing wait": missing_wait,
    "peak": lambda: peaks(hr.OneDevice(), wide()),
    "peak with averages": lambda: peaks(hr.OneDevice(), wide(options=hr.Options(ema_decay=0.9))),
}


def main(*names: str) -> None:
    for name in names or CASES:
        say(case=name, **CASES[name]())


if __name__ == "__main__":
    main(*sys.argv[1:])
