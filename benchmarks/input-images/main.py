"""Photographs, decoded and resized: ours beside tf.data, Grain and DataLoader."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival

OURS = "ours, auto"

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tensorflow", help="a Python with tensorflow-cpu")
    parser.add_argument("--grain", help="a Python with grain")
    arguments = parser.parse_args()
    seconds = str(arguments.seconds)
    contestants: dict[str, Callable[[], float]] = {
        OURS: partial(rival, "ours_input", "images", "auto", seconds),
        "ceiling: 2 unconnected loops, our decoder": partial(rival, "bare_images", seconds, copies=2),
        "DataLoader, 2 workers": partial(rival, "dataloader_input", "images", "2", seconds),
        "DataLoader, 2 workers, our decoder": partial(rival, "dataloader_input", "decoder", "2", seconds),
    }
    if arguments.tensorflow:
        contestants["tf.data, AUTOTUNE"] = partial(rival, "tf_images", seconds, python=arguments.tensorflow)
    if arguments.grain:
        for name, threads in (("Grain, 2 threads", "2"), ("Grain, 4 threads", "4"), ("Grain, 2 processes", "0")):
            contestants[name] = partial(rival, "grain_images", threads, seconds, python=arguments.grain)
    figures = alternate(contestants, arguments.rounds)
    ratios = {f"{OURS} / {name}": ratio(figures, OURS, name) for name in figures if name != OURS}
    report(Path(__file__).parent, "images", "images/s", figures, ratios)
