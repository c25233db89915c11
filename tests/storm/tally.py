"""Adds up what storms have written."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["tally"]


def tally(path: Path) -> str:
    """Returns one line about all runs in a file of results.

    A seed with something wrong counts as mended if the last run of the seed, under the same strategy, is right.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    timed = [row["seconds"] for row in rows if "seconds" in row]
    last = {(row["seed"], row["strategy"]): bool(row["wrong"]) for row in rows}
    wrong = {(row["seed"], row["strategy"]) for row in rows if row["wrong"]}
    open_ = sum(last[each] for each in wrong)
    struck, hours = sum(row["struck"] for row in rows), sum(timed) / 3600
    untimed = f" (not counted: of {len(rows) - len(timed)} of the runs)" if len(timed) < len(rows) else ""
    return (
        f"{path.name}: {len(rows)} runs, {struck} faults, {hours:.2f} hours{untimed}; something wrong with "
        f"{len(wrong)} seeds, {len(wrong) - open_} of them right since"
    )
