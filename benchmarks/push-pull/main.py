"""A push and a pull between a worker and a server: headrace.parameter_server beside gloo, torch RPC and a Ray actor."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival

TCP = ("--tcp", "--shard-bytes", str(1 << 20))
SIZES = {"4 kB": "1000", "100 MB": "25000000"}
RAY = Path(__file__).parents[2] / ".cache" / "rivals" / "bin" / "python"
RIVALS = ("gloo", "torch RPC", "Ray actor")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ray", default=str(RAY), help="a Python that has ray and torch")
    options = parser.parse_args()
    contestants = {}
    for size, elements in SIZES.items():
        contestants |= {
            f"headrace, {size}": partial(rival, "ours_push_pull", elements),
            f"headrace, checks first, {size}": partial(rival, "ours_push_pull", elements, "--look"),
            f"gloo, {size}": partial(rival, "gloo_push_pull", elements),
            f"torch RPC, {size}": partial(rival, "rpc_push_pull", elements),
            f"Ray actor, {size}": partial(rival, "ray_push_pull", elements, python=options.ray),
            f"headrace, TCP with CURVE, {size}": partial(rival, "ours_push_pull", elements, *TCP, tuned=True),
        }
    figures = alternate(contestants, options.rounds)
    ratios = {
        f"{other} / {ours}, {size}": ratio(figures, f"{other}, {size}", f"{ours}, {size}")
        for size in SIZES
        for ours in ("headrace", "headrace, checks first")
        for other in RIVALS
    }
    ratios |= {
        f"headrace, TCP with CURVE / Ray actor, {size}": ratio(
            figures, f"headrace, TCP with CURVE, {size}", f"Ray actor, {size}"
        )
        for size in SIZES
    }
    report(Path(__file__).parent, "push-pull", "ms", figures, ratios)
