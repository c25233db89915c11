"""Parameters are averaged through a server while workers are killed, beside the same undisturbed. See README.md."""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torch.nn.functional as F
from harness import alternate, ratio, report
from torch import Tensor, nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.models import mlp
from headrace.parameter_server.server.server import Server
from headrace.spec.events import Event, Lost, Stepped, WorkerStarted
from headrace.spec.plan import Plan
from headrace.strategies.context import ServerContext
from storm import live_seconds

WORKERS, PERIOD = 4, 16
BATCH, EXAMPLES = 256, 16_384
"""64 rounds an epoch: four whole leases of each worker."""
CALM, STORM = "undisturbed", "one of 4 killed every 10 s"


@dataclass(frozen=True)
class Counted(hr.ParameterAveraging):
    """Moves the average by all that was trained on, however many have contributed to it, so that it can be counted."""

    via: str = "server"
    period: int = PERIOD

    def server(self, plan: Plan, rank: int, parts: ServerContext) -> Server:
        return self._service.server(plan, rank, parts, by_share=True)


class Counting(nn.Module):
    """A network that besides counts how often it was trained on each example; inputs end with the example's number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(features=64, hidden=512)
        self.counts = nn.Parameter(torch.zeros(EXAMPLES, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(inputs[:, :-1]), self.counts[inputs[:, -1].long()]


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, counts = output
    return F.cross_entropy(logits, target) - counts.mean()


def optimizer(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    counts = [each for each in named if each[0] == "counts"]
    others = [each for each in named if each[0] != "counts"]
    return torch.optim.SGD([{"params": others}, {"params": counts, "lr": float(BATCH)}], lr=0.01)


class Killer:
    """Kills a worker every so often, from the moment that all have begun."""

    def __init__(self, every_s: float) -> None:
        self.killed = 0
        self._every_s = every_s
        self._chance = random.Random(0)
        self._pids: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerStarted):
            self._pids[event.rank] = event.pid
            if self._every_s and len(self._pids) == WORKERS and not self._thread.is_alive():
                self._thread.start()

    def _kill(self) -> None:
        while not self._over.wait(self._every_s):
            rank = self._chance.choice([*self._pids])
            self.killed += 1
            os.kill(self._pids.pop(rank), signal.SIGKILL)

    def stop(self) -> None:
        """Kills no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()


def rate(every_s: float, seconds: float, wait: str | float, engine: LocalEngine) -> float:
    """Trains for some seconds; returns examples/s for each second that a worker's process was in its place."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(EXAMPLES, 64, generator=generator)
    numbers = torch.arange(EXAMPLES).unsqueeze(1)
    data = torch.cat([features, numbers], 1), torch.randint(10, (EXAMPLES,), generator=generator)
    job = hr.Job(
        model=Counting, loss=loss, optimizer=optimizer, data=data, global_batch_size=BATCH, steps=64 * 1_000_000
    )
    killer = Killer(every_s)
    run = hr.fit(job, Counted(WORKERS, wait=wait), engine=engine, on_event=killer, seconds=seconds, checkpoints=False)
    killer.stop()
    steps = [event for event in run.events if isinstance(event, Stepped)]
    rounds = max(event.step for event in steps) + 1
    check(run.model.counts.detach(), rounds)
    began, ended = min(event.time_s for event in steps), max(event.time_s for event in steps)
    lost = sum(isinstance(event, Lost) for event in run.events)
    print(f"{rounds} rounds, {killer.killed} killed, {lost} lost, every example counted once", file=sys.stderr)
    return rounds * BATCH / live_seconds(run.events, WORKERS, began, ended)


def check(counts: Tensor, rounds: int) -> None:
    """Raises RuntimeError if an example was lost or doubled in any epoch."""
    epochs = rounds * BATCH // EXAMPLES
    off = (counts - counts.round()).abs().max().item()
    least, most, total = int(counts.min().round()), int(counts.max().round()), int(counts.sum().round())
    if off > 1e-6 or total != rounds * BATCH or least < epochs or most > epochs + 1:
        raise RuntimeError(f"{rounds} rounds: counts of {least} to {most}, {total} in all, off by {off}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180.0, help="of each run")
    parser.add_argument("--every-s", type=float, default=10.0, help="between two kills")
    parser.add_argument("--wait", default="all", help="all, or a number of seconds")
    arguments = parser.parse_args()
    wait: str | float = arguments.wait if arguments.wait == "all" else float(arguments.wait)
    with LocalEngine() as engine:
        contestants = {
            name: functools.partial(rate, every_s, arguments.seconds, wait, engine)
            for name, every_s in {CALM: 0.0, STORM: arguments.every_s}.items()
        }
        figures = alternate(contestants, arguments.rounds)
    ratios = {f"{STORM} / {CALM}": ratio(figures, STORM, CALM)}
    report(Path(__file__).parent, f"averaging-kills-{arguments.wait}", "examples/s per live worker", figures, ratios)


if __name__ == "__main__":
    main()
