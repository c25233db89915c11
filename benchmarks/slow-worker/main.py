"""What one slow worker of four costs, under every strategy with servers and under all-reduce. See README.md."""

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
from headrace.strategies import Strategy

WORKERS = 4
EXAMPLES = 60_000
OWN = "own speeds: 4 unconnected"


@dataclass(frozen=True)
class SlowUnconnected(OneSlow, hr.Unconnected):
    """The workers' own speeds."""


@dataclass(frozen=True)
class SlowMirrored(OneSlow, hr.Mirrored):
    """All-reduce."""


@dataclass(frozen=True)
class SlowServed(OneSlow, hr.ParameterServer):
    """Parameter servers."""


@dataclass(frozen=True)
class SlowDownpour(OneSlow, hr.Downpour):
    """Downpour."""


STRATEGIES = {
    OWN: SlowUnconnected(WORKERS),
    "asynchronous": SlowServed(WORKERS),
    "downpour, intervals 5": SlowDownpour(WORKERS),
    "bound 8": SlowServed(WORKERS, staleness_bound=8),
    "bound 2": SlowServed(WORKERS, staleness_bound=2),
    "bound 0": SlowServed(WORKERS, staleness_bound=0),
    "1 backup worker": SlowServed(WORKERS, backup_workers=1),
    "all-reduce": SlowMirrored(WORKERS),
}


def throughput(strategy: Strategy, seconds: float, engine: LocalEngine) -> float:
    """Trains for some seconds; returns examples/s in steady state."""
    from headrace.api.fit import fit

    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(EXAMPLES, 64, generator=generator), torch.randint(10, (EXAMPLES,), generator=generator)
    job = hr.Job(
        model=functools.partial(mlp, features=64, hidden=64),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples),
        global_batch_size=WORKERS * 16,
        steps=1_000_000,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = fit(job, strategy, run_dir=Path(folder) / "run", seconds=seconds, engine=engine)
        rate = run.throughput
    if rate is None:
        raise RuntimeError(f"{seconds} s are too short")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    arguments = parser.parse_args()
    with LocalEngine() as engine:
        contestants = {
            name: functools.partial(throughput, strategy, arguments.seconds, engine)
            for name, strategy in STRATEGIES.items()
        }
        figures = alternate(contestants, arguments.rounds)
    ratios = {f"{name} / own speeds": ratio(figures, name, OWN) for name in STRATEGIES if name != OWN}
    report(Path(__file__).parent, "slow-worker", "examples/s", figures, ratios)


if __name__ == "__main__":
    main()
