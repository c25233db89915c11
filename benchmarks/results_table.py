"""Prints a results file as Markdown: `results_table.py RESULTS.json ...`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def table(path: Path) -> str:
    """Returns the rows with median, least and most, and the ratios."""
    document = json.loads(path.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    runs = len(next(iter(document["figures"].values())))
    lines = [
        f"{document['date']}, {document['machine']}, {versions}; {document['unit']}, {runs} runs each.",
        "",
        "| | median | least | most |",
        "|---|--:|--:|--:|",
    ]
    for name, values in document["figures"].items():
        lines.append(f"| {name} | {statistics.median(values):.4g} | {min(values):.4g} | {max(values):.4g} |")
    lines += ["", "| ratio, median over the rounds | |", "|---|--:|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in document["ratios"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join(table(Path(name)) for name in sys.argv[1:]))
