"""A step of a model that is split over two processes, beside torch's own tensor parallelism. See README.md."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine

sys.path.insert(0, str(Path(__file__).parents[1]))
from blocks import BATCH, blocks
from harness import alternate, ratio, report, rival

OURS, THEIRS, ALONE = "headrace", "torch DTensor over gloo", "headrace, one device"


def train(steps: int, told: Path, worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round == 5:
            began = perf_counter()
        worker.step(batch)
        if worker.rank == 0 and worker.round == steps + 4:
            told.write_text(str(1e3 * (perf_counter() - began) / steps))


def milliseconds(engine: LocalEngine, strategy: hr.Strategy, width: int, steps: int) -> float:
    torch.manual_seed(0)
    job = hr.Job(
        model=functools.partial(blocks, width),
        loss=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=(torch.randn(2 * BATCH, width), torch.randn(2 * BATCH, width)),
        global_batch_size=BATCH,
        steps=steps + 5,
    )
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "milliseconds")
        timed = partial(train, steps, told)
        hr.launch(timed, job, strategy, run_dir=f"{folder}/run", engine=engine, checkpoints=False, device="cpu")
        return float(told.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    for width in (64, 512):
        with LocalEngine() as engine:
            ours = partial(milliseconds, engine, width=width, steps=arguments.steps)
            figures = alternate(
                {
                    OURS: partial(ours, hr.TensorParallel(devices=2)),
                    THEIRS: partial(rival, "torch_tensor_parallel", str(width), str(arguments.steps), tuned=True),
                    ALONE: partial(ours, hr.OneDevice(threads=1)),
                },
                arguments.rounds,
            )
        ratios = {f"{name} / {OURS}": ratio(figures, name, OURS) for name in (THEIRS, ALONE)}
        report(Path(__file__).parent, f"width-{width}", "ms a step", figures, ratios)


if __name__ == "__main__":
    main()
