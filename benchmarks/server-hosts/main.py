"""Parameter servers on several hosts: codecs on slow links, and how long a lost server takes. See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from on_hosts import hosts, run, run_forked
from one_rank import SERVER, struck

import headrace.engine.torchrun.engine  # noqa: F401
from headrace.engine.local.fork_server_main import load

HERE = Path(__file__).parent
RANK = HERE / "one_rank.py"
CODECS = ("plain", "bf16", "int8")
WORKERS_AND_SERVERS = (0, 1, 2, 3, 0, 1)
WORKERS_SERVER_BACKUP = (0, 1, 2, 3)
ROUNDS = 400
"""Half of them take longer than it takes to fill the backup; a loss before that ends a run."""


def rate(codec: str, steps: int) -> float:
    """Returns the examples a second of all workers."""
    said = run(RANK, len(WORKERS_AND_SERVERS), codec, str(steps), on=WORKERS_AND_SERVERS)[0]
    print(
        f"  {codec}: staleness {said['staleness']:.2f} on average, {said['bytes']:,.0f} bytes a step", file=sys.stderr
    )
    return said["rate"]


def failover(deed: str) -> float:
    """Returns the seconds from the loss of a server to the next round that all workers have done."""
    hosts("up", "4")
    said = run_forked(partial(struck, deed, ROUNDS), WORKERS_SERVER_BACKUP, lost=(SERVER,))
    if said["wrong"]:
        raise RuntimeError(f"{said['wrong']:g} gradients were lost or applied twice")
    return said["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="of all workers together")
    parser.add_argument("--losses", type=int, default=100, help="servers to kill, and to cut off")
    arguments = parser.parse_args()
    try:
        if arguments.rounds:
            hosts("up", "4", "--rate", "100mbit")
            figures = alternate({each: partial(rate, each, arguments.steps) for each in CODECS}, arguments.rounds)
            ratios = {f"{each} / plain": ratio(figures, each, "plain") for each in CODECS[1:]}
            report(HERE, "codecs", "examples a second", figures, ratios)
        if arguments.losses:
            # So that its forks need not import it.
            load()
            figures = alternate({each: partial(failover, each) for each in ("kill", "cut")}, arguments.losses)
            report(HERE, "failover", "s to the next round", figures, {})
    finally:
        hosts("down")


if __name__ == "__main__":
    main()
