"""What one slow worker of four costs under Sandblaster. See README.md."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, ratio, report
from on_hosts import hosts, run_forked
from one_slow import SLOWER

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.models import mlp
from headrace.spec.events import Stepped
from headrace.spec.plan import Plan
from headrace.strategies import Strategy, WorkerContext
from headrace.training.exchange import Replica

WORKERS = 4
EXAMPLES = 6_400
ROUNDS = 4
PAUSE_S = 0.05
SLOW, EQUAL, APART = "one of 4 workers 4 x slower", "4 equal workers", "4 equal workers on 2 hosts"


@dataclass(frozen=True)
class Paused(hr.Sandblaster):
    """Every worker sleeps for each portion, worker 0 `slower` times as long."""

    slower: int = 1

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        pause, module = PAUSE_S * (self.slower if rank == 0 else 1), context.module
        module.register_forward_pre_hook(lambda *_: time.sleep(pause) if module.training else None)
        return super().replica(plan, rank, context)


def seconds(strategy: Strategy, engine: LocalEngine | None = None, run_dir: Path | None = None) -> float:
    """Trains some rounds; returns the seconds from the first portion to the last."""
    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(EXAMPLES, 64, generator=generator), torch.randint(10, (EXAMPLES,), generator=generator)
    job = hr.Job(
        model=functools.partial(mlp, features=64, hidden=64),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.LBFGS, max_iter=2, max_eval=8, line_search_fn="strong_wolfe"),
        data=hr.data.from_arrays(*examples),
        global_batch_size=EXAMPLES,
        epochs=ROUNDS,
    )
    run = hr.fit(job, strategy, engine=engine, run_dir=run_dir, checkpoints=False)
    times = [event.time_s for event in run.events if isinstance(event, Stepped)]
    return max(times) - min(times)


def apart() -> float:
    """Returns the same for two workers on each of two hosts, and a server on the second one."""
    hosts("up", "2")
    try:
        said = run_forked(
            lambda _, folder: {"seconds": seconds(Paused(WORKERS), None, folder / "run")}, (0, 1, 0, 1, 1)
        )
    finally:
        hosts("down")
    return said["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", action="store_true", help="compare with two hosts of scripts/hosts instead; as root")
    arguments = parser.parse_args()
    if arguments.hosts:
        # Each by itself: processes of one host are forked by the engine's, those of two by this one, without threads.
        figures = {APART: [apart() for _ in range(arguments.rounds)]}
        with LocalEngine() as engine:
            figures[EQUAL] = [seconds(Paused(WORKERS), engine) for _ in range(arguments.rounds)]
        report(Path(__file__).parent, "two-hosts", "s", figures, {f"{APART} / {EQUAL}": ratio(figures, APART, EQUAL)})
        return
    with LocalEngine() as engine:
        strategies = {EQUAL: Paused(WORKERS), SLOW: Paused(WORKERS, slower=SLOWER)}
        contestants = {name: functools.partial(seconds, strategy, engine) for name, strategy in strategies.items()}
        figures = alternate(contestants, arguments.rounds)
    ratios = {f"{SLOW} / {EQUAL}": ratio(figures, SLOW, EQUAL)}
    report(Path(__file__).parent, "sandblaster", "s", figures, ratios)


if __name__ == "__main__":
    main()
