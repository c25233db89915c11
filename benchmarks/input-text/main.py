"""Text, tokenised: a batch at a time beside DataLoader, which does it one by one."""

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
    contestants = {
        OURS: partial(rival, "ours_input", "text", "auto", seconds),
        "DataLoader, without workers": partial(rival, "dataloader_input", "text", "0", seconds),
        "DataLoader, 2 workers": partial(rival, "dataloader_input", "text", "2", seconds),
    }
    figures = alternate(contestants, arguments.rounds)
    ratios = {f"{OURS} / {name}": ratio(figures, OURS, name) for name in figures if name != OURS}
    report(Path(__file__).parent, "text", "pieces of 1,000 characters a second", figures, ratios)
