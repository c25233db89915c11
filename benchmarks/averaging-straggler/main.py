"""What one slow worker of four costs where parameters are averaged, by whom an average waits for. See README.md."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, ratio, report
from one_slow import OneSlow

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.models import mlp
from headrace.spec.events import Stepped
from headrace.strategies import Strategy

WORKERS, PERIOD = 4, 16
BATCH = WORKERS * 16
EXAMPLES = 60_000
OWN = "the other three, unconnected"


class Slow(OneSlow):
    """Shorter, so that there are many averages."""

    pause_s = 0.02


@dataclass(frozen=True)
class SlowUnconnected(Slow, hr.Unconnected):
    """The workers' own speeds."""


@dataclass(frozen=True)
class SlowAveraging(Slow, hr.ParameterAveraging):
    """Averaging."""


STRATEGIES: dict[str, Strategy] = {
    OWN: SlowUnconnected(WORKERS),
    "wait=3": SlowAveraging(WORKERS, period=PERIOD, via="server", wait=3),
    "wait=0.1 (s)": SlowAveraging(WORKERS, period=PERIOD, via="server", wait=0.1),
    'wait="all"': SlowAveraging(WORKERS, period=PERIOD, via="server"),
    "all-reduce": SlowAveraging(WORKERS, period=PERIOD),
}


def throughput(strategy: Strategy, seconds: float, engine: LocalEngine) -> float:
    """Trains for some seconds; returns examples/s that count: those of parameters that came too late do not."""
    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(EXAMPLES, 64, generator=generator), torch.randint(10, (EXAMPLES,), generator=generator)
    job = hr.Job(
        model=functools.partial(mlp, features=64, hidden=64),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples),
        global_batch_size=BATCH,
        steps=1_000_000,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = hr.fit(job, strategy, run_dir=Path(folder) / "run", seconds=seconds, engine=engine, checkpoints=False)
        steps = [event for event in run.events if isinstance(event, Stepped)]
    lasted = max(event.time_s for event in steps) - min(event.time_s for event in steps)
    if isinstance(strategy, hr.Unconnected):
        return sum(event.examples for event in steps if event.rank) / lasted
    # Where they end, all rounds in front are done, and each of them once.
    return (max(event.step for event in steps) + 1) * BATCH / lasted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    arguments = parser.parse_args()
    with LocalEngine() as engine:
        contestants = {
            name: functools.partial(throughput, strategy, arguments.seconds, engine)
            for name, strategy in STRATEGIES.items()
        }
        figures = alternate(contestants, arguments.rounds)
    ratios = {f"{name} / {OWN}": ratio(figures, name, OWN) for name in STRATEGIES if name != OWN}
    report(Path(__file__).parent, "averaging-straggler", "examples/s", figures, ratios)


if __name__ == "__main__":
    main()
