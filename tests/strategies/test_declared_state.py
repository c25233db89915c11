"""What a strategy saves of its own is declared, or refused at the first save; what is declared comes back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace as hr
from headrace.averaging.local_steps import LocalStepsExchange
from headrace.averaging.mixing import ParameterMixing
from headrace.checkpoint import CheckpointFolder
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
    extra: Any = field(default_factory=dict)

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
        self._key, self._log, self._extra = strategy.key, context.log, strategy.extra
        self.state_keys = (strategy.key,) if strategy.declares else ()
        self.anchor: dict[str, Tensor] = {name: each.clone() for name, each in self._named.items()}

    def mix(self, round_: int) -> None:
        self._log("anchors/rank", torch.tensor(self.group.rank + 0.5, requires_grad=True), round_)
        for name, tensor in self._named.items():
            tensor.lerp_(self.anchor[name], 0.5 / (1 + self.group.rank))
            self.anchor[name] = tensor.clone()

    def settings(self) -> dict[str, Any]:
        extra: dict[str, Any] = self._extra
        return extra

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


class OwnExchange(LocalStepsExchange):
    """Keeps something of each worker beside what synchronizes it."""

    def own(self) -> tuple[StatePiece, ...]:
        return (*super().own(), StatePiece.of("0.weight", "steps", 0, torch.ones(1)))


@pytest.mark.slow
def test_what_an_exchange_has_of_its_own_is_saved_beside_what_synchronizes(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Both(Anchored):
        name = "both"

        def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
            broadcast(context.module, context.group)
            local = LocalExchange(plan.segments, context, first=rank)
            mixing = AnchoredMixing(self, context, local)
            exchange = OwnExchange(local, mixing)
            exchange.state_keys = (*exchange.state_keys, "steps")
            return Replica(context.whole_model(local_shares=self.workers), exchange, mixing)

    fit(Both(2), tmp_path, 1)
    saved = CheckpointFolder(tmp_path / "checkpoints")
    last = saved.open(saved.steps()[-1])
    assert all("own/0.weight/steps@0" in last.read(rank) for rank in (0, 1))


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
@pytest.mark.every
@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            Anchored(2, declares=False),
            r"AnchoredMixing saves 'anchor' of '0\.weight', which is neither a key of the optimizer's state "
            r"\(momentum_buffer\) nor declared; say state_keys = \('anchor',\) in AnchoredMixing",
        ),
        (
            Anchored(2, key="momentum_buffer", declares=False),
            r"AnchoredMixing saves '0\.weight/momentum_buffer@0' twice, of which a checkpoint holds one",
        ),
        (
            Anchored(2, key="momentum_buffer"),
            r"'momentum_buffer' in state_keys, and that is a key of the optimizer's state, which would not get it back",
        ),
        (Anchored(2, key="anchor/mean"), r"'anchor/mean' in state_keys, and that is empty, or has / or ~"),
        (Anchored(2, extra={"groups": []}), r"settings\(\) of AnchoredMixing has left out or changed 'groups'"),
        (
            Anchored(2, extra=[1]),
            r"settings\(\) of AnchoredMixing returns \[1\], and must return a dict",
        ),
        (Anchored(2, extra={1: 2}), "settings has the key 1, which is no text"),
        (Anchored(2, extra={"a": torch.ones(1)}), r"settings\.a is tensor.* which is no JSON value"),
    ],
)
def test_what_a_resumed_run_would_lose_is_refused_at_the_first_save(
    strategy: Strategy, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        fit(strategy, tmp_path, 1)
