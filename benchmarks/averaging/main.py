"""Throughput of the mlp with two workers that average their parameters, beside the ceiling. See README.md."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival
from workloads import throughput

import headrace as hr
from headrace.engine.local.engine import LocalEngine

CEILING = "ceiling: 2 unconnected, tuned"
FRESH = "the same, fresh batches"
STRATEGIES = {
    "period 1": hr.ParameterAveraging(2, period=1),
    "period 16": hr.ParameterAveraging(2, period=16),
    "automatic period": hr.ParameterAveraging(2, period="auto"),
    "DiLoCo, period 100": hr.DiLoCo(2),
    "EASGD, period 16": hr.EASGD(2),
    "unconnected": hr.Unconnected(2),
    "mirrored": hr.Mirrored(2),
}


def fresh(seconds: float) -> float:
    """Returns what the ceiling's loop makes when it takes other examples in every step."""
    os.environ["FRESH"] = "1"
    try:
        return rival("ddp", "1", "mlp", str(seconds), copies=2, tuned=True)
    finally:
        del os.environ["FRESH"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    arguments = parser.parse_args()
    for name in ("THREADS", "FRESH"):
        os.environ.pop(name, None)
    with LocalEngine() as engine:
        contestants = {
            CEILING: partial(rival, "ddp", "1", "mlp", str(arguments.seconds), copies=2, tuned=True),
            FRESH: partial(fresh, arguments.seconds),
            **{
                name: partial(throughput, "mlp", strategy, workers=2, seconds=arguments.seconds, engine=engine)
                for name, strategy in STRATEGIES.items()
            },
        }
        figures = alternate(contestants, arguments.rounds)
    ratios = {
        f"{name} / {of}": ratio(figures, name, of)
        for of in (CEILING, FRESH, "unconnected")
        for name in STRATEGIES
        if name != of
    }
    report(Path(__file__).parent, "averaging", "examples/s", figures, ratios)


if __name__ == "__main__":
    main()
