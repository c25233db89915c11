"""A step of Mirrored on 2 hosts x 2 workers, by codec, and of DDP over gloo on the same links. See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from on_hosts import hosts, run
from one_rank import mlp

HERE = Path(__file__).parent
HOSTS, EACH = 2, 2
WORLD = HOSTS * EACH
DDP = "DDP, gloo"
TENSORFLOW = "TF MultiWorkerMirrored"
PYTHON = Path(__file__).parents[2] / ".cache" / "tensorflow" / "bin" / "python"
WAYS = {DDP: "ddp", "Mirrored": "plain", "Mirrored, bf16": "bf16", "Mirrored, int8": "int8"}
BYTES = {"plain": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}


def predicted(way: str) -> float:
    """Returns the bytes that a host sends in a step.

    2 (H - 1)/H of the gradients of one model; in a flat ring of W ranks, which crosses each link once, 2 (W - 1)/W.
    """
    elements = sum(parameter.numel() for parameter in mlp().parameters())
    if way in ("ddp", TENSORFLOW):
        return 4 * elements * 2 * (WORLD - 1) / WORLD
    return BYTES[way] * elements * 2 * (HOSTS - 1) / HOSTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument(
        "--tensorflow", type=Path, default=PYTHON, help="a Python that has TensorFlow; left out without"
    )
    arguments = parser.parse_args()
    ways = {**WAYS, **({TENSORFLOW: TENSORFLOW} if arguments.tensorflow.exists() else {})}
    sent: dict[str, list[float]] = {name: [] for name in ways}

    updates: dict[str, list[float]] = {f"{name}, update": [] for name, way in WAYS.items() if way != "ddp"}

    def seconds(name: str, way: str) -> float:
        on, steps = [rank // EACH for rank in range(WORLD)], str(arguments.steps)
        if way == TENSORFLOW:
            python = str(arguments.tensorflow)
            said = run(HERE / "tensorflow_rank.py", WORLD, str(EACH), steps, on=on, python=python)
        else:
            said = run(HERE / "one_rank.py", WORLD, way, steps, on=on)
        # All ranks of a host count what the host has sent.
        sent[name].append(sum(rank["bytes"] for rank in said) / WORLD / 1e6)
        if way not in ("ddp", TENSORFLOW):
            updates[f"{name}, update"].append(max(rank["update"] for rank in said))
        return max(rank["seconds"] for rank in said)

    try:
        hosts("up", str(HOSTS), "--rate", arguments.rate)
        figures = alternate({name: partial(seconds, name, way) for name, way in ways.items()}, arguments.rounds)
    finally:
        hosts("down")
    unit = f"s a step, {HOSTS} hosts x {EACH} workers, links of {arguments.rate}"
    ratios = {f"{DDP} / {name}": ratio(figures, DDP, name) for name in ways}
    if TENSORFLOW in ways:
        ratios[f"{TENSORFLOW} / Mirrored"] = ratio(figures, TENSORFLOW, "Mirrored")
    report(HERE, "seconds", unit, figures | updates, ratios)
    told = sent | {f"{name}, predicted": [predicted(way) / 1e6] * arguments.rounds for name, way in ways.items()}
    report(HERE, "bytes", "MB a step and host", told, {name: ratio(told, name, f"{name}, predicted") for name in ways})


if __name__ == "__main__":
    main()
