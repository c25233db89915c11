"""One of three workers half as fast: equal shares of a batch, and shares that follow the speed. See README.md."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, ratio, report

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.models import mlp
from headrace.spec.plan import Plan
from headrace.strategies import Strategy, WorkerContext
from headrace.training.exchange import Replica

WORKERS = 3
BATCH = 32 * WORKERS
EXAMPLES = 60_000
OWN = "own speeds: 3 unconnected"


class HalfSpeed(Strategy):
    """Lets every worker sleep for each of its examples, worker 0 twice as long; comes before a strategy."""

    pause_s = 1e-3

    def replica(self, plan: Plan, rank: int, parts: WorkerContext) -> Replica:
        pause = self.pause_s * (2 if rank == 0 else 1)

        def wait(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            if module.training:
                time.sleep(pause * len(inputs[0]))

        parts.module.register_forward_pre_hook(wait)
        return super().replica(plan, rank, parts)


@dataclass(frozen=True)
class SlowUnconnected(HalfSpeed, hr.Unconnected):
    """The workers' own speeds."""


@dataclass(frozen=True)
class SlowMirrored(HalfSpeed, hr.Mirrored):
    """All-reduce."""


@dataclass(frozen=True)
class SlowCentral(HalfSpeed, hr.CentralStorage):
    """One copy."""


STRATEGIES: dict[str, Strategy] = {
    OWN: SlowUnconnected(WORKERS),
    "mirrored, equal": SlowMirrored(WORKERS),
    "mirrored, speed": SlowMirrored(WORKERS, balance="speed"),
    "central storage, equal": SlowCentral(WORKERS),
    "central storage, speed": SlowCentral(WORKERS, balance="speed"),
}


def throughput(strategy: Strategy, seconds: float, engine: LocalEngine) -> float:
    """Trains for some seconds; returns examples/s, from the sixth step on."""
    job = hr.Job(
        model=functools.partial(mlp, features=64, hidden=64),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=(torch.randn(EXAMPLES, 64), torch.randint(10, (EXAMPLES,))),
        global_batch_size=BATCH,
        epochs=1000,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = hr.fit(job, strategy, engine=engine, run_dir=folder, seconds=seconds, checkpoints=False)
        balance = run.summary.balance
        if balance:
            print(f"  shares {balance.last} after {len(balance.splits) - 1} changes", file=sys.stderr)
        assert run.throughput is not None
        return run.throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0)
    arguments = parser.parse_args()
    with LocalEngine() as engine:
        figures = alternate(
            {
                name: functools.partial(throughput, strategy, arguments.seconds, engine)
                for name, strategy in STRATEGIES.items()
            },
            arguments.rounds,
        )
    ratios = {
        "mirrored: speed / equal": ratio(figures, "mirrored, speed", "mirrored, equal"),
        "central storage: speed / equal": ratio(figures, "central storage, speed", "central storage, equal"),
        "mirrored, speed / own speeds": ratio(figures, "mirrored, speed", OWN),
    }
    report(Path(__file__).parent, "balance", "examples/s", figures, ratios)


if __name__ == "__main__":
    main()
