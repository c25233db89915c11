"""Counts the pushes of real runs while workers, servers and backups are killed and frozen. See README.md."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.spec.events import Stepped

sys.path.insert(0, str(Path(__file__).parents[1]))
from storm import Storm

EXAMPLES, BATCH = 96, 16
WORKERS, SERVERS = 4, 2
PUSHES_AN_EPOCH = EXAMPLES // BATCH * WORKERS
TIMEOUT_S = 3.0


class Count(nn.Module):
    """Its parameters count how often each example was trained on, if the learning rate is the batch."""

    def __init__(self) -> None:
        super().__init__()
        halves = (nn.Parameter(torch.zeros(EXAMPLES // 2, dtype=torch.float64)) for _ in range(2))
        self.low, self.high = halves

    def forward(self, inputs: Tensor) -> Tensor:
        return -inputs @ torch.cat([self.low, self.high])


def mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def counted(transport: str, epochs: int, every_s: float, seed: int) -> dict[str, object]:
    """Trains through a storm; returns how far the counts are from what they should be, and what has struck."""
    strategy = hr.ParameterServer(WORKERS, servers=SERVERS, backups=1, transport=transport)
    storm = Storm(strategy, every_s, seed)
    job = hr.Job(
        model=Count,
        loss=mean,
        optimizer=functools.partial(torch.optim.SGD, lr=float(BATCH)),
        data=(torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES)),
        global_batch_size=BATCH,
        epochs=epochs,
    )
    run = hr.fit(job, strategy, on_event=storm, timeout_s=TIMEOUT_S)
    low, high = (part.detach() for part in (run.model.low, run.model.high))
    off = torch.cat([low, high]) - epochs
    assert (off - off.round()).abs().max() < 1e-6, "what is no whole number is no count"
    # A server and its backup take each other's place.
    roles = ["worker"] * WORKERS + ["server or backup"] * 2 * SERVERS
    return {
        "transport": transport,
        "pushes": len({event.lease for event in run.events if isinstance(event, Stepped) and event.lease >= 0}),
        "examples_lost": int(off.round().clamp(max=0).abs().sum()),
        "examples_doubled": int(off.round().clamp(min=0).sum()),
        "faults": dict(Counter(f"{roles[rank]} {how}" for _, rank, how in storm.struck)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pushes", type=int, default=100_000, help="of one run")
    parser.add_argument("--every-s", type=float, default=2.0, help="seconds between two faults")
    parser.add_argument("--runs", type=int, default=4)
    arguments = parser.parse_args()
    rows = []
    for run in range(arguments.runs):
        transport = ("shared_memory", "tcp")[run % 2]
        rows.append(counted(transport, arguments.pushes // PUSHES_AN_EPOCH, arguments.every_s, run))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "roles.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
