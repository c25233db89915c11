"""One of the ranks: one_rank.py WAY STEPS FOLDER. WAY is ddp or a codec of `hr.Mirrored`. See rank_on_host.py."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from rank_on_host import Said, ddp, main, ours

import headrace as hr
from headrace.spec.events import Stepped

SHAPE = (784,)


def mlp() -> nn.Sequential:
    """3.8 million parameters: 15 MB of gradients."""
    first = [nn.Linear(784, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1000))


def mirrored(codec: str, steps: int, folder: str, said: Said) -> None:
    run = ours(mlp, SHAPE, hr.Mirrored(codec=codec), steps, folder, said)
    updates = [event.update_s for event in run.events if isinstance(event, Stepped) and event.step]
    said["update"] = sum(updates) / len(updates)


if __name__ == "__main__":
    main({"ddp": partial(ddp, mlp, SHAPE), **{codec: partial(mirrored, codec) for codec in ("plain", "bf16", "int8")}})
