"""The second epoch from a cache beside the first, and beside no cache at all."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import report

from headrace.data import DecodeImage, InputPipeline, Loader, from_files

FOLDER = Path(__file__).parent
BATCH = 32
SIDE = 224


def epoch(pipeline: InputPipeline) -> float:
    """Returns the images/s of one epoch, in batches, in an order of its own."""
    loader = Loader(pipeline, 0, BATCH, (1,), 0)
    began = time.perf_counter()
    images = sum(len(share.batch) for share in loader.sweep())
    return images / (time.perf_counter() - began)


def once(photographs: str, folder: str) -> list[float]:
    """Returns images/s: without a cache, of a first epoch that fills one, of the next two."""
    plain = from_files(f"{photographs}/*.jpg").map(DecodeImage(SIDE, SIDE)).shuffle()
    cached = plain.cache(folder)
    return [epoch(plain), *(epoch(cached) for _ in range(3))]


def later(photographs: str, folder: str) -> float:
    """Returns images/s of the first epoch of a process that finds a cache, and has to look at every checksum."""
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import main; print(main.again(*sys.argv[1:]))"
    command = [sys.executable, "-c", code, photographs, folder]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def again(photographs: str, folder: str) -> float:
    """Returns images/s of an epoch of the pipeline that `once` has run."""
    return epoch(from_files(f"{photographs}/*.jpg").map(DecodeImage(SIDE, SIDE)).shuffle().cache(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photographs", help="a folder of JPEG files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="of the cache; on the disk to be measured")
    chosen = parser.parse_args()
    rows = (
        "without a cache",
        "first epoch, filling it",
        "second epoch",
        "third epoch",
        "first epoch of a later process",
    )
    figures: dict[str, list[float]] = {row: [] for row in rows}
    for round_ in range(chosen.rounds):
        folder = tempfile.mkdtemp(prefix="cache-", dir=chosen.folder)
        try:
            found = once(chosen.photographs, folder)
            found.append(later(chosen.photographs, folder))
        finally:
            shutil.rmtree(folder)
        for row, value in zip(rows, found, strict=True):
            figures[row].append(value)
        print(f"round {round_ + 1}/{chosen.rounds}", *map(round, found), file=sys.stderr, flush=True)

    def ratio(row: str, beside: str) -> float:
        return statistics.median(a / b for a, b in zip(figures[row], figures[beside], strict=True))

    report(
        FOLDER, "cache", "images/s", figures,
        {
            "second epoch / first": ratio(rows[2], rows[1]),
            "second epoch / without a cache": ratio(rows[2], rows[0]),
            "first epoch of a later process / without a cache": ratio(rows[4], rows[0]),
            "first epoch / without a cache": ratio(rows[1], rows[0]),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
