"""A loop in which rank 1 leaves the others in a round, on purpose or because it is killed somewhere in a step."""

from __future__ import annotations

import functools
import os
import signal

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.training.turns import TurnsExchange

ROUND = 7
"""The round in which it is lost."""


class Sensitive(nn.Sequential):
    """Draws random numbers, has running statistics and counts, so that a trace of a round that was not done shows."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
        self.calls = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs) * (1 + 0.01 * self.calls)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def job(rounds: int = 16, **changes: object) -> hr.Job:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(60, 4, generator=generator)
    given: dict[str, object] = {
        "model": Sensitive,
        "task": hr.tasks.regression(),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "data": (inputs, inputs.sum(1, keepdim=True)),
        "global_batch_size": 12,
        "steps": rounds,
    }
    return hr.Job(**{**given, **changes})  # type: ignore[arg-type]


def lose_rank_1(how: str, first_without: int, worker: hr.Worker) -> None:
    """Trains; rank 1 is lost so that `first_without` is the first round without it."""
    for batch in worker.batches():
        if how == "on purpose" and worker.round == first_without - 1 and worker.rank == 0:
            # Before this round's barriers, so that all know it after them.
            page = worker._session.page
            page.ranks[1].leave, page.change_after = 1, first_without
        if worker.rank == 1 and worker.round == ROUND:
            plant(how, worker)
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()


def plant(how: str, worker: hr.Worker) -> None:
    exchange = worker._session.replica.exchange
    if isinstance(exchange, TurnsExchange):
        exchange = exchange._exchanges[worker.turn]
    # That of workers that average is beside the averaging.
    updating = getattr(exchange, "_local", exchange)
    if how == "in forward":
        worker.model.register_forward_pre_hook(lambda *_: die())
    elif how == "while it sums":
        getattr(exchange, "_reduction", exchange).reduce = die  # type: ignore[attr-defined]
    elif how == "in its update":
        updating.updater.optimizer.register_step_pre_hook(lambda *_: die())  # type: ignore[attr-defined]
    elif how == "after half of its update":
        updating.updater.optimizer.register_step_post_hook(lambda *_: die())  # type: ignore[attr-defined]
