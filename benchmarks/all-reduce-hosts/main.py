"""An all-reduce of 100 MB between hosts, encrypted, against gloo's, which is not, and the line. See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from on_hosts import hosts, run

HERE = Path(__file__).parent
BYTES = 100_000_000
OURS, GLOO, LINE = "headrace, encrypted", "gloo, plain", "the line"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="all-reduces of a round")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=int, default=1000)
    arguments = parser.parse_args()
    count = arguments.hosts
    formula = 2 * (count - 1) / count * BYTES
    sent: dict[str, list[float]] = {OURS: [], GLOO: []}

    def seconds(name: str, way: str) -> float:
        said = run(HERE / "one_rank.py", count, way, str(arguments.repeats))
        sent[name].append(sum(each["bytes"] for each in said) / count / 1e6)
        return max(each["seconds"] for each in said)

    try:
        hosts("up", str(count), "--rate", f"{arguments.mbit}mbit")
        figures = alternate(
            {OURS: partial(seconds, OURS, "ours"), GLOO: partial(seconds, GLOO, "gloo")}, arguments.rounds
        )
    finally:
        hosts("down")
    figures[LINE] = [formula * 8 / (arguments.mbit * 1e6)] * arguments.rounds
    unit = f"s, {count} hosts, links of {arguments.mbit} Mbit/s"
    report(HERE, "seconds", unit, figures, {name: ratio(figures, LINE, name) for name in (OURS, GLOO)})
    sent["predicted"] = [formula / 1e6] * arguments.rounds
    report(HERE, "bytes", "MB a host", sent, {name: ratio(sent, name, "predicted") for name in (OURS, GLOO)})


if __name__ == "__main__":
    main()
