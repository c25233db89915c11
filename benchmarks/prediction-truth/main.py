"""Predictions beside published tables, and beside measurements of this machine: every row, fitted ones named."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from more import more
from pipelines import gpipe, pipedream, plans, torchgpipe, zero_bubble
from rows import Row
from scaling import goyal, horovod, tensorflow

FOLDER = Path(__file__).resolve().parent


def scaling_rows() -> list[Row]:
    """Returns the rows of the published scaling tables."""
    return [*tensorflow(), *horovod(), *goyal(), *torchgpipe(), *gpipe(), *pipedream(), *more()]


def table(rows: Sequence[Row], digits: int) -> str:
    """Returns the rows as Markdown."""
    lines = ["| table | case | published | predicted | error |", "|---|---|--:|--:|--:|"]
    for row in rows:
        predicted = "" if row.predicted is None else f"{row.predicted:.{digits}f}"
        error = "" if row.error is None else f"{row.error:+.1%}"
        note = "fitted" if row.fitted else f"missing: {row.missing}" if row.missing else error
        lines.append(f"| {row.table} | {row.case} | {row.published:g} | {predicted} | {note} |")
    return "\n".join(lines)


def errors(rows: Sequence[Row]) -> list[float]:
    """Returns the errors of the counted rows; one that is above 0 was predicted too fast."""
    return [row.error for row in rows if row.counted and row.error is not None]


def summary(rows: Sequence[Row]) -> str:
    """Returns the number of rows, and the median, the worst and the mean of their errors."""
    found = errors(rows)
    sizes = [abs(error) for error in found]
    return (
        f"{len(found)} rows counted, median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, "
        f"bias {statistics.mean(found):+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "published.json")
    options = parser.parse_args()
    bubbles, scaling, plan_rows = list(zero_bubble()), scaling_rows(), list(plans())
    print(table(bubbles, 4))
    exact = [row for row in bubbles if row.predicted is not None]
    same = sum(round(row.predicted or 0, 4) == row.published for row in exact)
    print(f"\nZero Bubble: {same} of {len(exact)} rows to 4 decimals\n")
    print(table(scaling, 3))
    print(f"\nscaling tables: {summary(scaling)}")
    for name in dict.fromkeys(row.table for row in scaling if row.counted):
        print(f"  {name}: {summary([row for row in scaling if row.table == name])}")
    print("\n| case | PipeDream's plan | ours | ms | ms |\n|---|---|---|--:|--:|")
    for case, theirs, ours, theirs_s, ours_s in plan_rows:
        print(f"| {case} | {theirs} | {ours} | {1e3 * theirs_s:.1f} | {1e3 * ours_s:.1f} |")
    options.out.write_text(
        json.dumps(
            {"rows": [{**asdict(row), "error": row.error} for row in (*bubbles, *scaling)], "plans": plan_rows},
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
