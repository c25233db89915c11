"""A step of a hybrid on 2 x 2 hosts and of DDP on 4, over slow links, and the bytes that it sends. See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from on_hosts import hosts, run
from one_rank import Alex
from rank_on_host import BATCH, SIZES

HERE = Path(__file__).parent
REPLICAS, DEVICES = 2, 2
COUNT = REPLICAS * DEVICES
FLOAT = 4

HYBRID, DDP = "hybrid, 2 x 2", "DDP, 4"


def predicted() -> dict[str, float]:
    """Returns the bytes that a host sends in a step (Krizhevsky, 2014, with data parallelism around it).

    In a replica of K hosts, each of which has B examples: the convolutions' gradients, 2 (K - 1)/K of their
    parameters; at each boundary of dense layers activations forward, and as many gradients backward, (K - 1) B of
    them each; of the outputs those forward alone. Between R replicas: 2 (R - 1)/R of what a host holds.
    """
    model = Alex()
    convolution = sum(parameter.numel() for parameter in model.convolution.parameters())
    dense = sum(parameter.numel() for parameter in model.dense.parameters())
    own = BATCH // COUNT
    inner = 2 * (DEVICES - 1) / DEVICES * convolution
    inner += (DEVICES - 1) * own * (2 * sum(SIZES[:-1]) + SIZES[-1])
    outer = 2 * (REPLICAS - 1) / REPLICAS * (convolution + dense / DEVICES)
    return {HYBRID: FLOAT * (inner + outer), DDP: FLOAT * 2 * (COUNT - 1) / COUNT * (convolution + dense)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    arguments = parser.parse_args()
    sent: dict[str, list[float]] = {HYBRID: [], DDP: []}

    def seconds(name: str, way: str) -> float:
        said = run(HERE / "one_rank.py", COUNT, way, str(arguments.steps))
        sent[name].append(sum(each["bytes"] for each in said) / COUNT)
        return max(each["seconds"] for each in said)

    try:
        hosts("up", str(COUNT), "--rate", arguments.rate)
        timed = {HYBRID: partial(seconds, HYBRID, "hybrid"), DDP: partial(seconds, DDP, "ddp")}
        figures = alternate(timed, arguments.rounds)
    finally:
        hosts("down")
    unit = f"s a step, links of {arguments.rate}"
    report(HERE, "seconds", unit, figures, {f"{DDP} / {HYBRID}": ratio(figures, DDP, HYBRID)})
    formula = predicted()
    told = {name: [each / 1e6 for each in values] for name, values in sent.items()}
    told |= {f"{name}, predicted": [formula[name] / 1e6] * arguments.rounds for name in sent}
    report(HERE, "bytes", "MB a step and host", told, {name: ratio(told, name, f"{name}, predicted") for name in sent})


if __name__ == "__main__":
    main()
