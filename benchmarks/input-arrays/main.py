"""Arrays in memory, shuffled: ours beside plain indexed slicing and DataLoader."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival

OURS = "ours"

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    seconds = str(arguments.seconds)
    for workload in ("arrays", "bytes"):
        contestants = {
            OURS: partial(rival, "ours_input", workload, "auto", seconds),
            "plain indexed slicing": partial(rival, "indexed_slicing", workload, seconds),
            "DataLoader": partial(rival, "dataloader_input", workload, "0", seconds),
            "DataLoader, 2 workers": partial(rival, "dataloader_input", workload, "2", seconds),
        }
        figures = alternate(contestants, arguments.rounds)
        ratios = {f"{OURS} / {name}": ratio(figures, OURS, name) for name in figures if name != OURS}
        report(Path(__file__).parent, workload, f"{workload}: examples/s", figures, ratios)
