"""Sets of parameters that take turns, while workers are lost and come back."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from engine.conftest import until
from engine.elastic_loops import ROUND, job, lose_rank_1
from engine.test_elastic import Hand
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import Event, Notice, Stepped, WorkerStarted
from headrace.strategies import Strategy

pytestmark = pytest.mark.slow


class Halves(nn.Module):
    """Draws random numbers and has running statistics in both sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(inputs))
        return output


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def in_turns(rounds: int = 16, **changes: Any) -> hr.Job:
    decays = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    given: dict[str, Any] = {
        "model": Halves,
        "task": None,
        "optimizer": {
            "first": hr.ParameterSet(functools.partial(torch.optim.Adam, lr=0.01), rounds=2, schedule=decays),
            "last": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        },
        "loss": {"first": loss, "last": loss},
        "options": hr.Options(ema_decay=0.9),
        **changes,
    }
    return job(rounds, **given)


STRATEGIES = [hr.Mirrored(3, min_workers=2), hr.CentralStorage(3, min_workers=2)]


def trained(engine: LocalEngine, strategy: Strategy, how: str, first_without: int) -> dict[str, Tensor]:
    run = hr.launch(functools.partial(lose_rank_1, how, first_without), in_turns(), strategy, engine=engine)
    said = [event.text for event in run.events if isinstance(event, Notice)]
    assert f"round {first_without} begins with 2 workers: without rank 1" in said
    return dict(run.model.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("how", ["in forward", "while it sums", "in its update"])
def test_a_round_that_was_not_done_is_the_same_sets_again(engine: LocalEngine, strategy: Strategy, how: str) -> None:
    # A mirror's update is done where it was lost; a part of the one copy is not.
    first_without = ROUND + (how == "in its update" and strategy.name == "mirrored")
    wanted = trained(engine, strategy, "on purpose", first_without)
    found = trained(engine, strategy, how, first_without)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Plain(nn.Module):
    """Draws nothing, so that N workers are one. From the 100th on, a batch takes half a second until a file exists."""

    def __init__(self, awaited: Path) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
        self._awaited, self._calls = awaited, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self._calls += 1
        if self._calls > 100:
            until(self._awaited.exists, 0.5)
        output: Tensor = self.last(self.first(inputs))
        return output


class Returned:
    """Kills rank 1, and makes a file when the process in its place has stepped."""

    def __init__(self, done: Path) -> None:
        self._hand, self._done = Hand({30: (1, signal.SIGKILL)}), done
        self._starts = 0

    def __call__(self, event: Event) -> None:
        self._hand(event)
        self._starts += isinstance(event, WorkerStarted) and event.rank == 1
        if self._starts == 2 and isinstance(event, Stepped) and event.rank == 1:
            self._done.touch()


@pytest.mark.parametrize("kind", [hr.Mirrored, hr.CentralStorage])
def test_a_worker_that_comes_back_takes_the_state_of_all_sets(
    engine: LocalEngine, kind: Callable[..., Strategy], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    wanted = in_turns(300, model=functools.partial(Plain, done), options=hr.Options())
    run = hr.fit(wanted, kind(2, min_workers=1, max_workers=2), engine=engine, on_event=Returned(done))
    assert done.exists()
    ranks = {event.rank for event in run.events if isinstance(event, Stepped) and event.step == 299}
    assert ranks == {0, 1}
    alone = hr.fit(wanted, engine=hr.ThreadEngine()).model.state_dict()
    for name, each in run.model.state_dict().items():
        torch.testing.assert_close(each, alone[name], rtol=1e-3, atol=1e-4)
