"""What a checkpoint costs on a GPU: the peak of its memory, and the longest step, beside a run without checkpoints.

A model of `--millions` parameters in AdamW; the peak without checkpoints is that of the steps alone. See README.md.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import report
from torch import nn

import headrace as hr

WIDTH, STEPS, EVERY = 2048, 60, 20
SETTLED = 5

longest: list[float] = []
"""Seconds of each step of the run that goes on, after the first ones."""


def timed(worker: hr.Worker) -> None:
    began = time.perf_counter()
    for number, batch in enumerate(worker.batches()):
        worker.step(batch)
        if number % 2 == 0:
            # Else the host would be ahead of the device, and no step would have a time.
            synchronize()
            now = time.perf_counter()
            if number > SETTLED:
                longest.append(now - began)
            began = now


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def stack(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), nn.Linear(WIDTH, 10))


def measured(millions: int, device: str, saves: bool) -> tuple[float, float]:
    """Returns the peak of the device's memory in MB, and the longest pair of steps in ms."""
    longest.clear()
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    x, y = torch.randn(512, WIDTH), torch.randint(10, (512,))
    job = hr.Job(
        model=functools.partial(stack, layers),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
        data=(x, y),
        global_batch_size=64,
        steps=STEPS,
    )
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    checkpoints = hr.Checkpoints(every_steps=EVERY) if saves else False
    with tempfile.TemporaryDirectory() as folder:
        hr.launch(
            timed, job, hr.OneDevice(), device=device, run_dir=Path(folder) / "run", engine=hr.ThreadEngine(),
            checkpoints=checkpoints, check=False,
        )  # fmt: skip
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else 0.0
    return peak, 1e3 * max(longest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=500, help="of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command out")
    arguments = parser.parse_args()
    figures: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name, saves in (("without", False), ("with", True)):
            peak, step = measured(arguments.millions, arguments.device, saves)
            figures.setdefault(f"peak in MB, {name} checkpoints", []).append(peak)
            figures.setdefault(f"longest two steps in ms, {name} checkpoints", []).append(step)
    report(Path(__file__).parent, f"checkpoints-{arguments.device}", "see the row", figures, {})


if __name__ == "__main__":
    main()
