"""The cnn under `fit` and under the bare loop, ten steps each in turn: what a machine that drifts hides from main.py.

Two processes of the very same loop differ by some per cent for as long as they live, so every pair is made of new
processes, and pairs of two bare loops say how much a ratio means.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, ratio, report, rival
from overhead_job import make_data, make_model
from torch import nn
from turns import Turns, make_turns

import headrace as hr
from headrace.api.fit import fit
from headrace.strategies import OneDevice

BLOCK = 10


def make(workload: str, folder: Path, name: str, other: str, blocks: int) -> nn.Module:
    """Returns our contestant's model."""
    return Turns(make_model(workload), folder, name, other, block=BLOCK, blocks=blocks)


def bare(workload: str, blocks: int, folder: Path, name: str, other: str) -> None:
    """Runs the rival."""
    rival("bare_loop_in_turns", workload, str(folder), name, other, str(BLOCK), str(blocks), tuned=True)


def ours(workload: str, blocks: int, folder: Path, name: str, other: str) -> None:
    """Runs ours."""
    job = hr.Job(
        model=partial(make, workload, folder, name, other, blocks),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*make_data(workload)).shuffle(),
        global_batch_size=64,
        steps=BLOCK * blocks + 1,
    )
    fit(job, OneDevice(threads=1), run_dir=folder / "run")


def pair(workload: str, blocks: int, contestant: str) -> float:
    """Returns the median, over the blocks, of a contestant's step over a bare loop's."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        make_turns(folder, "rival", "contestant")
        other = pool.submit(bare, workload, blocks, folder, "rival", "contestant")
        {"headrace": ours, "bare": bare}[contestant](workload, blocks, folder, "contestant", "rival")
        other.result()
        theirs, own = (json.loads((folder / f"{who}.json").read_text())[1:] for who in ("rival", "contestant"))
    return statistics.median(a / b for a, b in zip(own, theirs, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", default="cnn", choices=["tiny", "mlp", "cnn"])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    contestants = {
        f"{who} / bare": partial(pair, arguments.workload, arguments.blocks, who) for who in ("headrace", "bare")
    }
    figures = alternate(contestants, arguments.rounds)
    ratios = {"headrace / bare against bare / bare": ratio(figures, "headrace / bare", "bare / bare")}
    report(Path(__file__).parent, f"{arguments.workload}-in-turns", "of a bare step", figures, ratios)
