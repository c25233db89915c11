"""A job for `headrace train`, and what goes wrong in it: `--set end=nan`."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from engine.victims import BadExample, BadStep, Faulty, bad_loss, fail, rank

EXAMPLES = 64
INPUTS = torch.randn(EXAMPLES, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1, keepdim=True) + 0.1
HOURS = 10**6


def job(end: str = "", epochs: int = HOURS, folder: str = "") -> hr.Job:
    """Returns a job of 8 rounds an epoch that ends in some way, or that lasts for hours."""
    plain: dict[str, Any] = {
        "model": functools.partial(nn.Linear, 4, 1),
        "task": hr.tasks.regression(),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "data": (INPUTS, TARGETS),
        "eval_data": (INPUTS, TARGETS),
        "global_batch_size": 8,
        "epochs": epochs,
    }
    return hr.Job(**plain | (ENDS[end](Path(folder)) if end else {}))


def of_model(deed: Callable[[], object], victim: int | None = 1) -> Callable[[Path], dict[str, Any]]:
    """Returns the change of the job whose model does a deed in its third step on one rank."""
    return lambda _: {"model": functools.partial(Faulty, deed, victim)}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def root_loss(output: Tensor, target: Tensor) -> Tensor:
    """0, with a gradient that is not finite."""
    return (0.0 * (output - target)).sum().sqrt()


def take_memory() -> None:
    torch.empty(1 << 50)


def segmentation_fault() -> None:
    ctypes.string_at(0)


class Writes(nn.Linear):
    """Changes a parameter on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and rank() == 1:
            with torch.no_grad():
                self.bias.add_(1.0)
        return super().forward(inputs)


class Holds(nn.Linear):
    """Says by a file that its third step has begun, and ends it when that file is gone."""

    def __init__(self, file: Path) -> None:
        super().__init__(4, 1)
        self.file, self.steps = file, 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and rank() == 0:
            self.steps += 1
            if self.steps == 3:
                self.file.touch()
                while self.file.exists():
                    time.sleep(0.001)
        return super().forward(inputs)


class Callback(hr.Callback):
    def on_step(self, moment: hr.Moment) -> None:
        if moment.step == 4:
            fail()


class Stops(hr.Callback):
    def on_step(self, moment: hr.Moment) -> None:
        if moment.step == 4:
            moment.stop("it is enough")


def example(record: bytes) -> tuple[Tensor, Tensor]:
    return torch.tensor(struct.unpack("<4f", record)), torch.zeros(1)


def records(folder: Path) -> dict[str, Any]:
    """Reads records from the file that a test has written."""
    return {"data": hr.data.from_tfrecord(str(folder / "train.tfrecord")).map(example)}


ENDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "optimizer": lambda _: {"optimizer": BadStep},
    "stages": lambda _: {"model": two_layers},
    "nan": lambda _: {"optimizer": functools.partial(torch.optim.SGD, lr=1e30)},
    "gradient": lambda _: {"task": None, "loss": root_loss},
    "diverged": lambda _: {"optimizer": functools.partial(torch.optim.SGD, lr=1.5)},
    "loss": lambda _: {"task": None, "loss": bad_loss},
    "data": lambda _: {"data": BadExample()},
    "callback": lambda _: {"callbacks": [Callback()]},
    "stops": lambda _: {"callbacks": [Stops()]},
    "no better": lambda _: {"options": hr.Options(early_stopping=hr.EarlyStopping("loss", patience=1, min_delta=1e9))},
    "copies": lambda _: {"model": Writes},
    "memory": of_model(take_memory),
    "os._exit": of_model(functools.partial(os._exit, 3)),
    "sys.exit": of_model(functools.partial(sys.exit, 3)),
    "segfault": of_model(segmentation_fault),
    "records": records,
    "holds": lambda folder: {"model": functools.partial(Holds, folder / "held")},
}
