"""A step of a pipeline on two hosts, of Mirrored and of DDP, over slow links, and the bytes sent. See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from on_hosts import hosts, run
from rank_on_host import BATCH, SIZES

HERE = Path(__file__).parent
HOSTS = 2
FLOAT = 4
NAMES = {"pipeline": "pipeline, 2 stages", "mirrored": "mirrored, 2", "ddp": "DDP, 2"}


def predicted(way: str, features: float) -> float:
    """Returns the bytes that a host sends in a step.

    In a pipeline the activations at its cut, or as many gradients back; in a ring of K hosts that have all parameters,
    2 (K - 1)/K of these.
    """
    if way == "pipeline":
        return FLOAT * BATCH * features
    parameters = sum(inputs * outputs + outputs for inputs, outputs in pairwise(SIZES))
    return FLOAT * parameters * 2 * (HOSTS - 1) / HOSTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    arguments = parser.parse_args()
    sent: dict[str, list[float]] = {name: [] for name in NAMES.values()}
    formula: dict[str, list[float]] = {f"{name}, predicted": [] for name in NAMES.values()}

    def seconds(way: str) -> float:
        said = run(HERE / "one_rank.py", HOSTS, way, str(arguments.steps))
        sent[NAMES[way]].append(sum(each["bytes"] for each in said) / HOSTS / 1e6)
        formula[f"{NAMES[way]}, predicted"].append(predicted(way, said[0].get("features", 0)) / 1e6)
        return max(each["seconds"] for each in said)

    try:
        hosts("up", str(HOSTS), "--rate", arguments.rate)
        figures = alternate({name: partial(seconds, way) for way, name in NAMES.items()}, arguments.rounds)
    finally:
        hosts("down")
    ours = NAMES["pipeline"]
    ratios = {f"{name} / {ours}": ratio(figures, name, ours) for name in NAMES.values() if name != ours}
    report(HERE, "seconds", f"s a step, links of {arguments.rate}", figures, ratios)
    told = {**sent, **formula}
    report(HERE, "bytes", "MB a step and host", told, {name: ratio(told, name, f"{name}, predicted") for name in sent})


if __name__ == "__main__":
    main()
