"""FullySharded beside torch's own loop of fully_shard over gloo, and what a process holds. See README.md."""

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
from headrace.spec.events import WorkerEnded

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival
from stack import EXAMPLES_A_WORKER, block_bytes, stack

OURS, THEIRS = "headrace", "torch fully_shard over gloo"
OURS_2D, THEIRS_2D = "headrace, 2 x 2", "torch fully_shard and parallelize_module, 2 x 2"
WORKERS = 4


def train(told: Path, worker: hr.Worker) -> None:
    """Leaves rank 0's rate after the first 3 steps, in examples a second."""
    for batch in worker.batches():
        if worker.round == 3:
            began = perf_counter()
        worker.step(batch)
        if worker.rank == 0 and worker.round == worker.rounds - 1:
            rate = WORKERS * EXAMPLES_A_WORKER * (worker.rounds - 3) / (perf_counter() - began)
            told.write_text(str(rate))


def run(strategy: hr.Strategy, width: int, steps: int, engine: LocalEngine, folder: Path, told: Path) -> hr.Run:
    torch.manual_seed(0)
    examples = WORKERS * EXAMPLES_A_WORKER
    job = hr.Job(
        model=functools.partial(stack, width),
        loss=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.Adam, lr=0.001),
        data=(torch.randn(2 * examples, width), torch.randn(2 * examples, width)),
        global_batch_size=examples,
        steps=steps,
    )
    return hr.launch(
        partial(train, told), job, strategy, run_dir=folder / "run", engine=engine, checkpoints=False, device="cpu"
    )


def rate(strategy: hr.Strategy, engine: LocalEngine, width: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "rate")
        run(strategy, width, steps, engine, Path(folder), told)
        return float(told.read_text())


def held(engine: LocalEngine, strategy: hr.Strategy, width: int) -> tuple[float, float]:
    """Returns MB of the fullest process: parameters, gradients and optimizer state; and all that it grew by."""
    with tempfile.TemporaryDirectory() as folder:
        ended = [
            event
            for event in run(strategy, width, 6, engine, Path(folder), Path(folder, "rate")).events
            if isinstance(event, WorkerEnded)
        ]
    # There is a gradient of every parameter, of the same type.
    state = max(2 * event.parameter_bytes + event.optimizer_bytes for event in ended)
    return state / 1e6, max(event.peak_memory_bytes - event.runtime_bytes for event in ended) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 768])
    arguments = parser.parse_args()
    two_dimensions = hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2))
    for width in arguments.widths:
        with LocalEngine() as engine:
            figures = alternate(
                {
                    OURS: partial(rate, hr.FullySharded(WORKERS), engine, width, arguments.steps),
                    THEIRS: partial(rival, "torch_fully_shard", str(WORKERS), str(width), str(arguments.seconds)),
                    OURS_2D: partial(rate, two_dimensions, engine, width, arguments.steps),
                    THEIRS_2D: partial(
                        rival, "torch_fully_shard", str(WORKERS), str(width), str(arguments.seconds), "2"
                    ),
                },
                arguments.rounds,
            )
            sharded, one = (held(engine, each, width) for each in (hr.FullySharded(WORKERS), hr.OneDevice(threads=1)))
        report(
            Path(__file__).parent,
            f"width-{width}",
            "examples/s",
            figures,
            {f"{a} / {b}": ratio(figures, a, b) for a, b in ((OURS, THEIRS), (OURS_2D, THEIRS_2D))},
        )
        memory = {
            "a worker: parameters, gradients, state": [sharded[0]],
            "one device: the same": [one[0]],
            "a worker: all that its process grew by": [sharded[1]],
            "one device: all that its process grew by": [one[1]],
            "the largest unit": [block_bytes(width) / 1e6],
        }
        shares = {"a worker / one device: parameters, gradients, state": sharded[0] / one[0]}
        report(Path(__file__).parent, f"memory-{width}", "MB", memory, shares)


if __name__ == "__main__":
    main()
