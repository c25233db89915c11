"""Jobs that one thing each makes slow, on purpose: `headrace train job.py --set case=waits`."""

from __future__ import annotations

import fcntl
import functools
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import headrace as hr

EXAMPLES, WIDE = 2048, 64
PAUSE_S, BURN_S, SLOW_S = 1e-3, 4e-4, 0.02
LAUNCHER = os.getpid()
LOCKS = Path(tempfile.gettempdir()) / f"headrace-verdicts-{os.getuid()}"


@functools.cache
def is_slow(what: str) -> bool:
    """Whether this is the worker that is slow: of those that ask, the first; the launcher is none."""
    if os.getpid() == LAUNCHER:
        return False
    LOCKS.mkdir(exist_ok=True)
    # Open until the process ends.
    lock = os.open(LOCKS / what, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def waits(example: Any) -> Any:
    """Stands for a disk or a network."""
    time.sleep(PAUSE_S)
    return example


def burns(example: Any) -> Any:
    """Stands for a transform in Python."""
    end = time.thread_time() + BURN_S
    while time.thread_time() < end:
        pass
    return example


def augments(example: Any, rng: np.random.Generator) -> Any:
    """Draws random numbers, so that no cache keeps what it makes."""
    image, label = burns(example)
    return image * (1 + 0.01 * rng.random(dtype=np.float32)), label


def waits_on_one_worker(example: Any) -> Any:
    """Waits longer where the disk is slow."""
    time.sleep(PAUSE_S if is_slow("input") else PAUSE_S / 20)
    return example


class Photographs(Dataset):
    """Noise as PNG, which is decoded when it is asked for."""

    def __init__(self) -> None:
        buffer = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (96, 96), np.uint8)
        Image.fromarray(noise).save(buffer, "png")
        self.content = buffer.getvalue()

    def __len__(self) -> int:
        return EXAMPLES // 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(io.BytesIO(self.content)).resize((8, 8))
        return torch.from_numpy(np.asarray(image, np.float32) / 255).reshape(-1), index % 10


class Waiting(Photographs):
    """A set whose examples are far away."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(PAUSE_S)
        return torch.full((WIDE,), index / EXAMPLES), index % 10


class Slowed(nn.Module):
    """Takes longer for each example on one worker."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and is_slow("model"):
            time.sleep(SLOW_S * len(x) / 64)
        return x


def arrays(count: int = EXAMPLES, width: int = WIDE) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0)), torch.arange(count) % 10


def data_of(case: str) -> Any:
    """Returns what a case trains on."""
    pipeline = hr.data.from_arrays(*arrays()).shuffle()
    sets = {
        "waits": lambda: pipeline.map(waits, parallel="inline"),
        "waits_in_a_thread": lambda: pipeline.map(waits, parallel=1),
        "burns": lambda: pipeline.map(burns, parallel="inline"),
        "burns_ahead": lambda: pipeline.map(burns),
        "augments": lambda: pipeline.map(augments, parallel="inline"),
        "photographs": Photographs,
        "far_away": Waiting,
        "loader": lambda: DataLoader(Photographs(), batch_size=64, shuffle=True, num_workers=1),
        "uneven_input": lambda: pipeline.map(waits_on_one_worker, parallel="inline"),
    }
    return sets[case]() if case in sets else arrays(512 if case in LARGE else EXAMPLES)


def stack(width: int, layers: int) -> list[nn.Module]:
    return [each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())]


LARGE = ("compute", "stages", "table")
"""Cases whose examples are few, since each takes long."""


class Table(nn.Module):
    """8 million values, of which an example takes a few: little to compute, much to exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(1_000_000, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows((x.abs() * 1e5).long() % 1_000_000).mean(1)


def model_of(case: str) -> nn.Module:
    """Returns a case's model."""
    if case == "compute":
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions(48), nn.Flatten(), nn.Linear(48 * 64, 10))
    if case == "stages":
        return nn.Sequential(nn.Linear(WIDE, 768), *stack(768, 8), nn.Linear(768, 10))
    if case == "table":
        return nn.Sequential(Table(), nn.Linear(8, 10))
    first = [Slowed()] if case == "straggler" else []
    return nn.Sequential(*first, nn.Linear(WIDE, 32), nn.ReLU(), nn.Linear(32, 10))


def convolutions(channels: int) -> list[nn.Module]:
    first = nn.Conv2d(1, channels, 3, padding=1)
    return [first, *(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4))]


def job(case: str = "compute", epochs: int = 4, batch: int = 64) -> hr.Job:
    """Returns the job of a case."""
    return hr.Job(
        model=functools.partial(model_of, case),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=data_of(case),
        global_batch_size=batch,
        epochs=epochs,
    )
