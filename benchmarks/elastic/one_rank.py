"""One of the ranks on hosts: one_rank.py WAY STEPS FOLDER. See rank_on_host.py."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from rank_on_host import Said, dense, main, ours

import headrace as hr

INPUTS = 784
HIDDEN = {"mlp": (1536, 1024, 512), "small": (64,)}


def model(name: str) -> nn.Module:
    return dense((INPUTS, *HIDDEN[name], 1000))


def train(name: str, least: int | None, steps: int, folder: str, said: Said) -> None:
    ours(partial(model, name), (INPUTS,), hr.Mirrored(min_workers=least), steps, folder, said)


if __name__ == "__main__":
    main(
        {
            f"{name} {'elastic' if least else 'plain'}": partial(train, name, least)
            for name in HIDDEN
            for least in (None, 1)
        }
    )
