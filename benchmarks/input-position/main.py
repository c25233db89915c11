"""Goes on in the middle of the seventh epoch of ten million examples. See README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch

from headrace.data import Loader, from_arrays

BATCH = 256


def restore_s(count: int, epoch: int) -> float:
    """Returns the seconds from a definition to the first batch, from the middle of an epoch."""
    pipeline = from_arrays(torch.arange(count)).shuffle()
    began = perf_counter()
    loader = Loader(pipeline, 0, BATCH, (1,), 0)
    shares = loader.rounds(epoch * loader.rounds_per_epoch + loader.rounds_per_epoch // 2)
    assert next(shares).examples == BATCH
    taken = perf_counter() - began
    shares.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=10_000_000)
    parser.add_argument("--epoch", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    seconds = [restore_s(arguments.examples, arguments.epoch) for _ in range(arguments.rounds)]
    row = {**vars(arguments), "median_ms": 1e3 * statistics.median(seconds), "longest_ms": 1e3 * max(seconds)}
    print(json.dumps(row), file=sys.stderr)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "input-position.json").write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
