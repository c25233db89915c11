"""Whether `parallel="auto"` finds what a sweep by hand finds, over four pipelines."""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, report, rival
from input_workloads import cores

WORKLOADS = ("images", "python", "text", "arrays")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    ways = ["auto", "inline"]
    ways += [f"{kind}{count}" for kind in ("threads", "processes") for count in range(1, cores() + 1)]
    for workload in arguments.workloads:
        contestants = {way: partial(rival, "ours_input", workload, way, str(arguments.seconds)) for way in ways}
        figures = alternate(contestants, arguments.rounds)
        best = max(ways[1:], key=lambda way: statistics.median(figures[way]))
        ratios = [auto / by_hand for auto, by_hand in zip(figures["auto"], figures[best], strict=True)]
        ratio = {f"auto / {best}, the best by hand": statistics.median(ratios)}
        report(Path(__file__).parent, workload, f"{workload}: examples/s", figures, ratio)
