"""Options(recompute=...) beside torch's own checkpointing by hand: peak memory, and steps a second. See README.md."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import WorkerEnded

sys.path.insert(0, str(Path(__file__).parents[1]))
from blocks import EXAMPLES, LARGE, TINY, Stack, batch
from harness import alternate, ratio, report, rival

KINDS: dict[str, str | Sequence[str] | None] = {
    "none": None,
    "full": "full",
    "selective": "selective",
    "every second block": ["blocks.0", "blocks.2", "blocks.4", "blocks.6"],
}
LITTLE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "65536"}
"""Free memory goes back to the system at once, so that the size of a process is what it holds."""


def train(told: Path, worker: hr.Worker) -> None:
    """Leaves the rate after the first 3 steps, in steps a second."""
    for batch_ in worker.batches():
        if worker.round == 3:
            began = perf_counter()
        worker.step(batch_)
        if worker.round == worker.rounds - 1:
            told.write_text(str((worker.rounds - 3) / (perf_counter() - began)))


def ours(kind: str, steps: int, figure: str, width: int, tokens: int, *, engine: LocalEngine) -> float:
    job = hr.Job(
        model=partial(Stack, width),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.Adam, lr=0.001, fused=True),
        data=batch(width, tokens),
        global_batch_size=EXAMPLES,
        steps=steps,
        options=hr.Options(recompute=KINDS[kind]),
    )
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "rate")
        run = hr.launch(
            partial(train, told), job, hr.OneDevice(threads=1), run_dir=Path(folder, "run"), engine=engine,
            checkpoints=False, device="cpu",
        )  # fmt: skip
        if figure == "rate":
            return float(told.read_text())
        return max(event.peak_memory_bytes for event in run.events if isinstance(event, WorkerEnded)) / 1e6


def theirs(kind: str, steps: int, figure: str, width: int, tokens: int) -> float:
    return rival("torch_recompute", kind, str(steps), figure, str(width), str(tokens), tuned=figure == "rate")


def measured(contestant: Callable[..., float], kind: str, steps: int, figure: str) -> float:
    """Returns steps a second, or MB more than with a tiny model."""
    large = contestant(kind, steps, figure, *LARGE)
    return large if figure == "rate" else large - contestant(kind, steps, figure, *TINY)


def compare(figure: str, unit: str, kinds: Sequence[str], steps: int, rounds: int) -> None:
    with LocalEngine() as engine:
        contestants = {}
        for kind in kinds:
            own = partial(ours, engine=engine)
            contestants[f"headrace, {kind}"] = partial(measured, own, kind, steps, figure)
            contestants[f"torch, {kind}"] = partial(measured, theirs, kind, steps, figure)
        figures = alternate(contestants, rounds)
    ratios = {f"{kind}: headrace / torch": ratio(figures, f"headrace, {kind}", f"torch, {kind}") for kind in kinds}
    if "none" in kinds:
        nothing = statistics.median(figures["headrace, none"])
        for kind in kinds:
            ratios[f"headrace, {kind} / none"] = statistics.median(figures[f"headrace, {kind}"]) / nothing
    report(Path(__file__).parent, figure, unit, figures, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", default=["memory", "rate"], help="memory, rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    arguments = parser.parse_args()
    if "memory" in arguments.figures:
        os.environ.update(LITTLE)
        compare("memory", "MB", arguments.kinds, 5, 1)
        for name in LITTLE:
            del os.environ[name]
    if "rate" in arguments.figures:
        compare("rate", "steps/s", arguments.kinds, arguments.steps, arguments.rounds)


if __name__ == "__main__":
    main()
