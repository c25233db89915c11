"""What `headrace recommend` takes on this machine, run beside the next four, six jobs.

    .venv/bin/python benchmarks/recommended-plan/main.py [--jobs mlp,cnn] [--rounds 3] [--seconds 4]

Each job is profiled, recommended for and trained as a user does; the five take turns. Target: what is recommended is
never more than 10 % slower than the best of the five. With nothing else running, about 10 minutes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "prediction-truth"))
from configurations import job as common_job
from harness import alternate, machine

import headrace as hr
from headrace.api.fit import fit
from headrace.spec.cluster import Host

HERE = Path(__file__).parent
CLUSTER = hr.Cluster((Host("here", os.cpu_count() or 1, 16 << 30),))
EXAMPLES = 10_000_000
"""To train in all, so that the start of workers does not decide."""
OTHERS = 4
SLOWER = 1.1


class Recurrent(nn.Module):
    """0.6 million parameters: one step of the network after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 128)
        self.memory = nn.LSTM(128, 256, batch_first=True)
        self.out = nn.Linear(256, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.memory(self.words(words))[0][:, -1])


def arrays(model: Callable[[], nn.Module], inputs: Tensor, batch: int) -> hr.Job:
    return hr.Job(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(inputs, torch.randint(0, 10, (len(inputs),))),
        global_batch_size=batch,
        steps=100,
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


JOBS: dict[str, Callable[[], hr.Job]] = {
    "perceptron, 64": lambda: arrays(perceptron, torch.randn(2048, 64), 64),
    "mlp, 32": lambda: common_job("mlp", 32),
    "mlp, 256": lambda: common_job("mlp", 256),
    "cnn, 64": lambda: common_job("cnn", 64),
    "transformer, 16": lambda: common_job("transformer", 16),
    "recurrent, 32": lambda: arrays(Recurrent, torch.randint(0, 1000, (1024, 32)), 32),
}


@dataclass(frozen=True)
class Row:
    job: str
    predicted: dict[str, float]
    measured: dict[str, list[float]]

    @property
    def slower(self) -> float:
        """Time of what was recommended over that of the best of the five."""
        rates = {name: statistics.median(values) for name, values in self.measured.items()}
        return max(rates.values()) / rates[next(iter(rates))]


def trained(job: hr.Job, strategy: str, seconds: float) -> float:
    """Returns the examples a second of some seconds of training."""
    from dataclasses import replace

    with tempfile.TemporaryDirectory() as folder:
        endless = replace(job, steps=1_000_000)
        rate = fit(endless, strategy, device="cpu", run_dir=Path(folder) / "run", seconds=seconds).throughput
    assert rate is not None, f"{seconds} s are too short for {strategy}"
    return rate


def measured(name: str, rounds: int, seconds: float) -> Row:
    job = JOBS[name]()
    advice = hr.recommend(hr.profile(job), CLUSTER, global_batch_size=job.global_batch_size, examples=EXAMPLES)
    offers = [advice.winner, *(each for each in advice.best if each.text != advice.winner.text and not each.refused)]
    plans = offers[: 1 + OTHERS]
    figures = alternate({each.text: functools.partial(trained, job, each.text, seconds) for each in plans}, rounds)
    return Row(name, {each.text: EXAMPLES / each.seconds for each in plans}, figures)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    asked = parser.parse_args()
    wanted = [each for each in asked.jobs.split(",") if each]
    rows = [
        measured(name, asked.rounds, asked.seconds)
        for name in JOBS
        if not wanted or any(name.startswith(each) for each in wanted)
    ]
    print("| job | recommended | its time over the best of five | the five, predicted and measured examples/s |")
    print("|---|---|--:|---|")
    for row in rows:
        five = "; ".join(
            f"{text} {row.predicted[text]:.4g}, {statistics.median(rates):.4g}" for text, rates in row.measured.items()
        )
        print(f"| {row.job} | `{next(iter(row.measured))}` | {row.slower:.2f} | {five} |")
    document: dict[str, Any] = {**machine(), "rows": [vars(row) | {"slower": row.slower} for row in rows]}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "recommended-plan.json").write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(any(row.slower > SLOWER for row in rows))


if __name__ == "__main__":
    main()
