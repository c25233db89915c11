"""One of the ranks: one_rank.py ddp | hybrid STEPS FOLDER. See rank_on_host.py."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from rank_on_host import Said, ddp, dense, main, ours

import headrace as hr

SHAPE = (3, 16, 16)
RULES = {"convolution": "batch", "dense.*": "column"}


class Alex(nn.Module):
    """AlexNet's dense layers behind one convolution that makes as many features as AlexNet's five."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Sequential(nn.Conv2d(3, 256, 11), nn.ReLU())
        self.dense = dense()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.dense(self.convolution(images).flatten(1))
        return features


def hybrid(steps: int, folder: str, said: Said) -> None:
    strategy = hr.Hybrid(hr.Mirrored(workers=2), hr.TensorParallel(devices=2, rules=RULES))
    ours(Alex, SHAPE, strategy, steps, folder, said)


if __name__ == "__main__":
    main({"ddp": partial(ddp, Alex, SHAPE), "hybrid": hybrid})
