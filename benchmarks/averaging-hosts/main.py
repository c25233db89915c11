"""Time to an accuracy, and bytes an example, of averaging and of all-reduce on four hosts. See README.md."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from on_hosts import hosts, run

HERE = Path(__file__).parent
RANK = HERE / "one_rank.py"
COUNT = 4

MIRRORED = "mirrored"
TIMED = {
    MIRRORED: "mirrored",
    "averaging, automatic period": "parameter_averaging(period='auto')",
    "DiLoCo, period 20": "diloco(period=20)",
}
CODED = "DiLoCo, period 100, int8"
COUNTED = {MIRRORED: ("mirrored", "from 10 to 30"), CODED: ("diloco(period=100,codec='int8')", "from 100 to 300")}


def seconds(strategy: str, target: float) -> float:
    """Trains to an accuracy; returns rank 0's seconds without the evaluations."""
    said = run(RANK, COUNT, strategy, f"to {target}")[0]
    print(f"  {strategy}: {json.dumps(said)}", file=sys.stderr, flush=True)
    if "accuracy" not in said:
        raise RuntimeError(f"{strategy} does not come to {target}")
    return said["seconds"]


def bytes_an_example(strategy: str, way: str) -> float:
    """Returns what all hosts sent, over what all workers trained on."""
    said = run(RANK, COUNT, strategy, way)
    return sum(each["bytes"] for each in said) / sum(each["examples"] for each in said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.85, help="accuracy on the test images")
    parser.add_argument("--slower", type=float, default=10.0, help="all-reduce takes so many times a step's compute")
    parser.add_argument("--rate", help="of the links, 20mbit, instead of what --slower makes of a measurement")
    arguments = parser.parse_args()
    try:
        rate = arguments.rate
        if rate is None:
            hosts("up", str(COUNT))
            said = run(RANK, COUNT, "mirrored(overlap=False)", "from 5 to 40")[0]
            # A ring sends 2 (N - 1) / N of the gradients over every link.
            sent_bits = 16 * (COUNT - 1) / COUNT * said["gradient_bytes"]
            rate = f"{int(sent_bits / (arguments.slower * said['compute_s']) / 1e3)}kbit"
            print(f"a step computes for {1e3 * said['compute_s']:.1f} ms; links of {rate}", file=sys.stderr)
        hosts("up", str(COUNT), "--rate", rate)
        said = run(RANK, COUNT, "mirrored(overlap=False)", "from 5 to 20")[0]
        print(f"an all-reduce takes {said['exchange_s'] / said['compute_s']:.1f} steps", file=sys.stderr)
        timed = {name: partial(seconds, strategy, arguments.target) for name, strategy in TIMED.items()}
        figures = alternate(timed, arguments.rounds)
        ratios = {f"{MIRRORED} / {name}": ratio(figures, MIRRORED, name) for name in TIMED if name != MIRRORED}
        report(HERE, "seconds", f"s to {arguments.target}, links of {rate}", figures, ratios)
        counted = {name: partial(bytes_an_example, *each) for name, each in COUNTED.items()}
        figures = alternate(counted, 1)
        report(HERE, "bytes", "bytes an example", figures, {f"{MIRRORED} / {CODED}": ratio(figures, MIRRORED, CODED)})
    finally:
        hosts("down")


if __name__ == "__main__":
    main()
