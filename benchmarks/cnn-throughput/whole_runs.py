"""Examples/s of whole runs on the cnn by order of memory. See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from workloads import throughput

import headrace as hr
from headrace.engine.local.engine import LocalEngine

STRATEGIES: dict[str, tuple[hr.Strategy, int]] = {"one_device": (hr.OneDevice(), 1), "mirrored": (hr.Mirrored(2), 2)}
ORDERS = ("preserve", "channels_last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    arguments = parser.parse_args()
    with LocalEngine() as engine:
        contestants = {
            f"{name}, {order}": partial(
                throughput, "cnn", strategy, workers, arguments.seconds, engine, options=hr.Options(memory_format=order)
            )
            for name, (strategy, workers) in STRATEGIES.items()
            for order in ORDERS
        }
        figures = alternate(contestants, arguments.rounds)
    ratios = {
        f"{name}: channels_last / preserve": ratio(figures, f"{name}, channels_last", f"{name}, preserve")
        for name in STRATEGIES
    }
    report(Path(__file__).parent, "whole-runs", "examples/s", figures, ratios)


if __name__ == "__main__":
    main()
