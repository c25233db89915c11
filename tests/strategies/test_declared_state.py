"""What a strategy saves of its own is declared, or refused at the first save; what is declared comes back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headrace as hr
from headrace.averaging.local_steps import LocalStepsExchange
from headrace.averaging.mixing import ParameterMixing
from headrace.errors import UsageError
from headrace.policies.roles import data_parallel_plan
from headrace.report.trackers.curves import EventCurves
from headrace.spec.cluster import Cluster
from headrace.spec.events import RunStarted, ValuesLogged
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies import WorkerContext
from headrace.strategies.broadcast import broadcast
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica
from headrace.training.optimizer import StatePiece
from strategies.contract_models import Case, dense
from strategies.contract_runs import distance

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Anchored(Strategy):
    """Workers that are drawn to where they were in the round before, whose anchor is saved under `key`."""

    workers: int
    key: str = "anchor"
    declares: bool = True

    name = "anchored"
    equals_one_device = False

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return data_parallel_plan(self.name, describe_options(self), self.workers, model, cluster, copies=(4, 0))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        broadcast(context.module, context.group)
        local = LocalExchange(plan.segments, context, first=rank)
        mixing = AnchoredMixing(self, context, local)
        return Replica(context.whole_model(local_shares=self.workers), LocalStepsExchange(local, mixing), mixing)


class AnchoredMixing(ParameterMixing):
    """Takes the mean of what a worker has and what it had."""

    def __init__(self, strategy: Anchored, context: WorkerContext, local: LocalExchange) -> None:
        super().__init__(1, context.module, local.updater, context.group)
        self._key, self._log = strategy.key, context.log
        self.state_keys = (strategy.key,) if strategy.declares else ()
        self.anchor: dict[str, Tensor] = {name: each.clone() for name, each in self._named.items()}

    def mix(self, round_: int) -> None:
        self._log("anchors/rank", torch.tensor(self.group.rank + 0.5, requires_grad=True), round_)
        for name, tensor in self._named.items():
            tensor.lerp_(self.anchor[name], 0.5 / (1 + self.group.rank))
            self.anchor[name] = tensor.clone()

    def own(self) -> tuple[StatePiece, ...]:
        return *super().own(), *(StatePiece.of(name, self._key, 0, each) for name, each in self.anchor.items())

    def load(self, pieces: tuple[StatePiece, ...], settings: object) -> None:  # type: ignore[override]
        super().load(pieces, None)
        for piece in pieces:
            if piece.key == self._key:
                piece.copy_to(self.anchor[piece.parameter], 0)


def fit(strategy: Strategy, folder: Path, epochs: int, resume: bool = False) -> hr.Run:
    job = dataclasses.replace(Case(dense, optimizer=MOMENTUM).job(23), global_batch_size=10, epochs=epochs)
    return hr.fit(job, strategy, device="cpu", run_dir=folder, engine=hr.ThreadEngine(), resume=resume)


@pytest.mark.slow
def test_declared_state_is_there_after_two_resumes(tmp_path: Path) -> None:
    """After one the pieces would be in the optimizer, too; after the second they would come from there."""
    strategy = Anchored(2)
    for epochs in (1, 2, 3):
        twice = fit(strategy, tmp_path / "twice", epochs, resume=epochs > 1)
    assert distance(twice.model.state_dict(), fit(strategy, tmp_path / "whole", 3).model.state_dict()) == 0.0


@pytest.mark.slow
def test_numbers_of_a_strategy_are_events_of_their_rank_and_curves(tmp_path: Path) -> None:
    run = fit(Anchored(2), tmp_path, 1)
    logged = [event for event in run.events if isinstance(event, ValuesLogged)]
    assert sorted((event.rank, event.step, event.values["anchors/rank"]) for event in logged) == [
        *((0, step, 0.5) for step in (1, 2, 3)),
        *((1, step, 1.5) for step in (1, 2, 3)),
    ]
    curves = EventCurves(next(event for event in run.events if isinstance(event, RunStarted)))
    tags = {each.tag for event in logged for each in curves.take(event)}
    assert tags == {"anchors/rank", "anchors/rank/rank-1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            Anchored(2, declares=False),
            r"AnchoredMixing saves 'anchor' of '0\.weight', which is neither a key of the optimizer's state "
            r"\(momentum_buffer\) nor declared; say state_keys = \('anchor',\) in AnchoredMixing",
        ),
        (
            Anchored(2, key="momentum_buffer"),
            r"AnchoredMixing saves '0\.weight/momentum_buffer@0' twice, of which a checkpoint holds one",
        ),
    ],
)
def test_what_a_resumed_run_would_lose_is_refused_at_the_first_save(
    strategy: Strategy, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        fit(strategy, tmp_path, 1)
