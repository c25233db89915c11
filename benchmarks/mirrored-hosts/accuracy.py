"""What codecs between hosts cost in accuracy: Fashion-MNIST on 2 hosts x 2 workers. See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, difference, report
from on_hosts import hosts, run

import headrace as hr

HERE = Path(__file__).parent
CODECS = ("plain", "bf16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    # The hosts reach no network, so the files must be in the cache.
    hr.data.fashion_mnist()
    losses: dict[str, list[float]] = {codec: [] for codec in CODECS}

    def accuracy(codec: str) -> float:
        seed = str(len(losses[codec]))
        said = run(HERE / "accuracy_rank.py", 4, codec, seed, on=[0, 0, 1, 1])[0]
        losses[codec].append(said["loss"])
        return said["accuracy"]

    try:
        hosts("up", "2")
        figures = alternate({codec: partial(accuracy, codec) for codec in CODECS}, arguments.seeds)
    finally:
        hosts("down")
    points = {f"{codec} - plain": difference(figures, codec, "plain") for codec in CODECS[1:]}
    report(HERE, "accuracy", "% of the test images", figures, points)
    report(HERE, "loss", "of the test images", losses, {})


if __name__ == "__main__":
    main()
