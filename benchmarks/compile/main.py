"""`compile=True` against eager mode, after warm-up: two runs of `fit` take turns of ten steps.

Two processes of the very same loop differ by some per cent for as long as they live, so every pair is made of new
processes, and pairs of two eager runs say how much a ratio means.
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
from harness import alternate, ratio, report
from torch import nn
from turns import Turns, make_turns
from workloads import MODELS, examples

import headrace as hr

BLOCK = 10


def make(workload: str, folder: Path, name: str, other: str, blocks: int) -> nn.Module:
    """Returns a contestant's model; whose turn it is, is asked outside of the graph."""
    turns = Turns(MODELS[workload][0](), folder, name, other, block=BLOCK, blocks=blocks)
    turns._turn = torch.compiler.disable(turns._turn)
    return turns


def train(workload: str, graph: bool, threads: int, blocks: int, folder: Path, name: str, other: str) -> None:
    """Runs a contestant."""
    job = hr.Job(
        model=partial(make, workload, folder, name, other, blocks),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples(workload, 4096)).shuffle(),
        global_batch_size=64,
        steps=BLOCK * blocks + 1,
        options=hr.Options(compile=graph),
    )
    hr.fit(job, hr.OneDevice(threads=threads), run_dir=folder / name)


def pair(workload: str, threads: int, blocks: int, graph: bool) -> float:
    """Returns the median, over the blocks, of a contestant's step over an eager one's."""
    with tempfile.TemporaryDirectory() as path, ThreadPoolExecutor(1) as pool:
        folder = Path(path)
        make_turns(folder, "contestant", "eager")
        other = pool.submit(train, workload, False, threads, blocks, folder, "eager", "contestant")
        train(workload, graph, threads, blocks, folder, "contestant", "eager")
        other.result()
        # The first block compiles.
        theirs, own = (json.loads((folder / f"{who}.json").read_text())[1:] for who in ("eager", "contestant"))
    return statistics.median(a / b for a, b in zip(own, theirs, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", default="cnn", choices=sorted(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    contestants = {
        f"{name} / eager": partial(pair, arguments.workload, arguments.threads, arguments.blocks, graph)
        for name, graph in (("compiled", True), ("eager", False))
    }
    figures = alternate(contestants, arguments.rounds)
    ratios = {"compiled / eager against eager / eager": ratio(figures, "compiled / eager", "eager / eager")}
    name = f"{arguments.workload}-{arguments.threads}-threads"
    report(Path(__file__).parent, name, "of an eager step", figures, ratios)
