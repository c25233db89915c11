"""Accuracy on Fashion-MNIST when parameters are averaged, the job unchanged, beside one device. See README.md."""

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
    "averaging, 4 workers, period 10": hr.ParameterAveraging(4, period=10),
    "averaging, 4 workers, period 10, state too": hr.ParameterAveraging(4, period=10, average_optimizer_state=True),
}
OTHERS = {
    "DiLoCo, 4 workers, period 10": hr.DiLoCo(4, period=10),
    "EASGD, 4 workers, period 10": hr.EASGD(4, period=10),
}


def accuracy(job: hr.Job, strategy: Strategy, seeds: list[int]) -> float:
    """Trains with the next seed; returns the accuracy on the test images, per cent."""
    run = hr.fit(dataclasses.replace(job, seed=seeds.pop(0)), strategy)
    return 100 * run.metrics["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--others", action="store_true", help="DiLoCo and EASGD, too")
    arguments = parser.parse_args()
    make: Callable[..., hr.Job] = runpy.run_path(str(ROOT / "examples" / "fashion_mnist" / "job.py"))["job"]
    job = make(epochs=arguments.epochs)
    strategies = {**STRATEGIES, **(OTHERS if arguments.others else {})}
    contestants = {
        name: functools.partial(accuracy, job, strategy, list(range(arguments.seeds)))
        for name, strategy in strategies.items()
    }
    figures = alternate(contestants, arguments.seeds)
    points = {f"{name} - {ONE}": difference(figures, name, ONE) for name in strategies if name != ONE}
    report(Path(__file__).parent, "averaging-accuracy", "% of the test images", figures, points)


if __name__ == "__main__":
    main()
