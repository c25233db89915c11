"""Whether exchanging during backward pays on a CPU host."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival

WAYS = {
    "compute": "no exchange at all",
    "after": "shared memory, after backward (what is used)",
    "thread": "shared memory, in a thread beside compute",
    "gloo-after": "gloo, after backward",
    "gloo-overlap": "gloo, buckets during backward",
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    contestants = {
        f"{workload}: {text}": partial(rival, "overlap_step", workload, way, str(arguments.seconds), tuned=True)
        for workload in ("mlp", "cnn")
        for way, text in WAYS.items()
    }
    figures = alternate(contestants, arguments.rounds)
    ratios = {
        f"{workload}: {WAYS[a]} / {WAYS[b]}": ratio(figures, f"{workload}: {WAYS[a]}", f"{workload}: {WAYS[b]}")
        for workload in ("mlp", "cnn")
        for a, b in (("thread", "after"), ("gloo-overlap", "gloo-after"))
    }
    report(Path(__file__).parent, "overlap", "ms a step", figures, ratios)
