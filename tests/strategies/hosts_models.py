"""What pipelines over several hosts train: cases that a process can import by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import headrace as hr
from strategies.contract_models import MODELS, VARIANTS, Case, images

__all__ = ["BEGUN", "CASES", "FEATURES", "MICRO_BATCH", "Deep", "job", "sent_bytes", "watched"]

MICRO_BATCH, FEATURES = 128, 4096
BEGUN: list[int] = []
"""What this host has sent whenever the forward of a micro-batch has begun."""


class Deep(nn.Module):
    """Eight layers; a value of the first goes to the last and past all between, one of the third to the sixth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = []
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + (values[2] if index == 5 else 0)
            values.append(x)
        return self.head(torch.cat([values[0], x], 1))


def normalised() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(8, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3))


CASES: Mapping[str, Case] = {
    "mlp": MODELS["mlp"],
    "deep": Case(Deep),
    "tied": MODELS["tied"],
    "clipped": VARIANTS["clipped"],
    "clipped-tied": dataclasses.replace(MODELS["tied"], options=hr.Options(clip_norm=0.1)),
    "tokens": VARIANTS["tokens"],
    "normalised": Case(normalised, images),
    "dropping": Case(dropping),
}


def sent_bytes() -> int:
    """What this host has sent, with all that the network adds."""
    (line,) = [each for each in Path("/proc/thread-self/net/dev").read_text().splitlines() if "eth0:" in each]
    # Behind the name eight numbers of what was received.
    return int(line.partition(":")[2].split()[8])


def watched() -> nn.Module:
    """Two layers with many features between them; the first notes when it runs."""
    first = nn.Linear(64, FEATURES)
    first.register_forward_pre_hook(lambda *_: BEGUN.append(sent_bytes()))
    return nn.Sequential(first, nn.Linear(FEATURES, 4))


def job(case: Case) -> hr.Job:
    """Returns a job of three rounds an epoch, the last with three examples."""
    return dataclasses.replace(case.job(19), global_batch_size=8)
