"""Accuracy on Fashion-MNIST under asynchrony, the job unchanged, beside one device. See README.md."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, difference, report

import headrace as hr
from headrace.strategies import Strategy

ROOT = Path(__file__).parents[2]
ONE = "one device"
STRATEGIES = {
    ONE: hr.OneDevice(),
    "4 asynchronous workers": hr.ParameterServer(4),
    "downpour, the paper's rule, 4 workers, intervals 5": hr.Downpour(4, push_every=5, fetch_every=5),
    "downpour, local='optimizer', 4 workers, intervals 5": hr.Downpour(
        4, push_every=5, fetch_every=5, local="optimizer"
    ),
}


def accuracy(job: hr.Job, strategy: Strategy, seeds: list[int]) -> float:
    """Trains with the next seed; returns the accuracy on the test images, per cent."""
    run = hr.fit(dataclasses.replace(job, seed=seeds.pop(0)), strategy)
    return 100 * run.metrics["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    make: Callable[..., hr.Job] = runpy.run_path(str(ROOT / "examples" / "fashion_mnist" / "job.py"))["job"]
    job = make(epochs=arguments.epochs)
    contestants = {
        name: functools.partial(accuracy, job, strategy, list(range(arguments.seeds)))
        for name, strategy in STRATEGIES.items()
    }
    figures = alternate(contestants, arguments.seeds)
    points = {f"{name} - {ONE}": difference(figures, name, ONE) for name in STRATEGIES if name != ONE}
    report(Path(__file__).parent, "server-accuracy", "% of the test images", figures, points)


if __name__ == "__main__":
    main()
