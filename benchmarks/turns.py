"""Two trainings in turns, a few steps each: a machine that drifts slows both alike."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn


class Turns(nn.Module):
    """A model that waits for its turn every `block` training steps, and times the steps between.

    Both contestants train this same module, so what it costs cancels. A step lasts from one forward to the next;
    the one after a wait is left out, for it finds the other's data in the caches. The medians of the blocks, in us,
    go to `folder/NAME.json` after `blocks` of them.
    """

    def __init__(self, model: nn.Module, folder: Path, name: str, other: str, *, block: int, blocks: int) -> None:
        super().__init__()
        self.model = model
        self._paths = (folder / f"{name}.turn", folder / f"{other}.turn")
        self._result = folder / f"{name}.json"
        self._block, self._blocks = block, blocks
        self._step = 0
        self._starts: list[float] = []
        self._figures: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled() and x.device.type != "meta":
            self._turn()
        return self.model(x)

    def _turn(self) -> None:
        if self._step % self._block == 0:
            if self._step:
                self._figures.append(_median_us(self._starts))
                _write(self._paths[1])
                if len(self._figures) == self._blocks:
                    self._result.write_text(json.dumps(self._figures))
            if len(self._figures) < self._blocks:
                _read(self._paths[0])
            self._starts = []
        self._step += 1
        self._starts.append(time.perf_counter())


def make_turns(folder: Path, first: str, second: str) -> None:
    """Makes the two queues and gives `first` the turn."""
    for name in (first, second):
        os.mkfifo(folder / f"{name}.turn")
    # Held open by this process, so that the byte survives until its reader comes.
    holder = os.open(folder / f"{first}.turn", os.O_RDWR)
    os.write(holder, b".")
    os.open(folder / f"{second}.turn", os.O_RDWR)


def _median_us(starts: list[float]) -> float:
    took = [after - before for before, after in itertools.pairwise(starts[1:])]
    return 1e6 * statistics.median(took)


def _write(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    os.write(descriptor, b".")
    os.close(descriptor)


def _read(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    os.read(descriptor, 1)
    os.close(descriptor)
