"""All-reduce among 2 and 4 processes of one host, beside gloo."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival

SIZES = {"4 kB": 1_000, "100 MB": 25_000_000}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    contestants = {
        f"{who}, {workers} processes, {size}": partial(rival, script, str(workers), str(elements))
        for workers in (2, 4)
        for size, elements in SIZES.items()
        for who, script in (("headrace", "ours_all_reduce"), ("gloo", "gloo_all_reduce"))
    }
    contestants["share of a core while waiting"] = partial(rival, "ours_all_reduce", "2", "1", "cpu")
    figures = alternate(contestants, rounds)
    ratios = {
        f"gloo / headrace, {workers} processes, {size}": ratio(
            figures, f"gloo, {workers} processes, {size}", f"headrace, {workers} processes, {size}"
        )
        for workers in (2, 4)
        for size in SIZES
    }
    report(Path(__file__).parent, "all-reduce", "ms", figures, ratios)
