"""One of the ranks: one_rank.py ddp | mirrored | pipeline STEPS FOLDER. See rank_on_host.py."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from rank_on_host import SIZES, Said, ddp, dense, main, ours

import headrace as hr

SHAPE = SIZES[:1]


def pipeline(steps: int, folder: str, said: Said) -> None:
    run = ours(dense, SHAPE, hr.Pipeline(micro_batches=8), steps, folder, said)
    # Values of so many features cross the cut, behind a linear layer or its ReLU.
    layers = sum(name.rpartition(".")[2] in ("0", "2", "4") for name in run.plan.partition[0])
    said["features"] = SIZES[layers]


def mirrored(steps: int, folder: str, said: Said) -> None:
    ours(dense, SHAPE, hr.Mirrored(), steps, folder, said)


if __name__ == "__main__":
    main({"ddp": partial(ddp, dense, SHAPE), "mirrored": mirrored, "pipeline": pipeline})
