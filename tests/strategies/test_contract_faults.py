"""The contract finds what it is for: strategies with a planted fault fail their row, with a message that says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.averaging.local_steps import LocalStepsExchange
from headrace.averaging.mixing import ParameterMixing
from headrace.errors import RanksDiffer
from headrace.policies.roles import data_parallel_plan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies import WorkerContext
from headrace.strategies.broadcast import broadcast
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.refusals import Refusal, local_steps, moving_average
from headrace.strategies.strategy import Strategy, describe_options
from headrace.testing.jobs import MOMENTUM, Case, Partial
from headrace.testing.strategies import (
    CHECKS,
    Check,
    check_left_out_step,
    check_metrics,
    check_nonfinite,
    check_options,
    check_reference,
    check_resume,
    check_statistics,
    check_weighed,
    require_resumes,
)
from headrace.testing.strategies import StrategyContract as Row
from headrace.training.clipping import HEALTHY, StepDecision
from headrace.training.exchange import Replica, UpdatingExchange
from headrace.training.optimizer import StatePiece
from headrace.worker.guards.equality import EqualityGuard
from strategies import references


@dataclass(frozen=True)
class Ring(Strategy):
    """Gossip on a ring as the page builds it, but for one `fault`; "" for none."""

    workers: int
    fault: str = ""

    name = "ring"
    equals_one_device = False

    def refusals(self) -> tuple[Refusal, ...]:
        return (
            ()
            if self.fault == "takes every option"
            else (*local_steps(self.name, "every round"), moving_average(self.name))
        )

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return data_parallel_plan(self.name, describe_options(self), self.workers, model, cluster, copies=(4, 0))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        broadcast(context.module, context.group)
        local = LocalExchange(plan.segments, context, first=0 if self.fault == "names rank 0" else rank)
        if self.fault.startswith("residual"):
            residual = ResidualMixing(self.fault, context, local)
            compute = context.whole_model(local_shares=len(plan.shares))
            return Replica(compute, LocalStepsExchange(local, residual), residual)
        mixing = RingMixing(self.fault, context, local)
        compute = context.whole_model(local_shares=0 if self.fault == "local_shares" else len(plan.shares))
        if self.fault == "never steps":
            return Replica(compute, LocalStepsExchange(StandingExchange(local), mixing), mixing)
        if self.fault == "divides by N":
            for parameter in context.module.parameters():
                parameter.register_hook(lambda gradient: gradient / context.group.world)
        return Replica(compute, LocalStepsExchange(local, mixing), mixing)


class RingMixing(ParameterMixing):
    """Takes the mean of a worker and the two beside it."""

    def __init__(self, fault: str, context: WorkerContext, local: LocalExchange) -> None:
        super().__init__(4 if "period 4" in fault else 1, context.module, local.updater, context.group)
        self._fault = fault
        self._statistics_too = fault != "statistics"

    def mix(self, round_: int) -> None:
        if self._fault == "never exchanges":
            return
        rank, world = self.group.rank, self.group.world
        left, right = self.theirs((rank - 1) % world), self.theirs((rank + 1) % world)
        count = len(self.tensors) if self._statistics_too else len(self._named) - len(self._statistics)
        for tensor, before, after in zip(self.tensors[:count], left, right, strict=False):
            tensor.add_(before).add_(after).div_(3)

    def own(self) -> tuple[StatePiece, ...]:
        pieces = super().own()
        if self._fault == "loses the other ranks' optimizers":
            return tuple(piece for piece in pieces if piece.key.startswith("headrace."))
        return () if self._fault == "loses the other ranks' parameters" else pieces

    def adopt_averaged_weights(self) -> None:
        if not self._fault.startswith("returns rank 0's model"):
            super().adopt_averaged_weights()


class ResidualMixing(ParameterMixing):
    """Sends what has moved since the last time in halves, of which each worker keeps the other as its residual."""

    state_keys = ("anchor", "residual")

    def __init__(self, fault: str, context: WorkerContext, local: LocalExchange) -> None:
        super().__init__(4, context.module, local.updater, context.group)
        self._fault = fault
        self._own_state = {
            key: {name: torch.zeros_like(each) for name, each in self._named.items()} for key in self.state_keys
        }
        for name, each in self._named.items():
            self._own_state["anchor"][name].copy_(each)

    def mix(self, round_: int) -> None:
        for name, tensor in self._named.items():
            anchor, residual = (self._own_state[key][name] for key in self.state_keys)
            moved = tensor - anchor + residual
            residual.copy_(moved / 2)
            anchor.add_(moved / 2)
            tensor.copy_(anchor)

    def own(self) -> tuple[StatePiece, ...]:
        lost = self._fault.removeprefix("residual: loses ")
        used = {name for name, each in self._named.items() if each.grad is not None or lost != "what is unused"}
        pieces = [
            StatePiece.of(name, key, 0, each)
            for key, tensors in self._own_state.items()
            for name, each in tensors.items()
            if key != lost and name in used
        ]
        return *super().own(), *pieces

    def load(self, pieces: Sequence[StatePiece], settings: Mapping[str, Any] | None) -> None:
        super().load(pieces, settings)
        for piece in pieces:
            if piece.key in self.state_keys and self._fault != "residual: does not read it":
                piece.copy_to(self._own_state[piece.key][piece.parameter], 0)


class StandingExchange(UpdatingExchange):
    """Leaves the parameters as they are."""

    def __init__(self, local: LocalExchange) -> None:
        self.updater, self.parameter_bytes = local.updater, local.parameter_bytes

    def synchronize(self, finite: bool = True) -> StepDecision:
        return HEALTHY

    def update(self, round_: int) -> None:
        self.updater.skip(round_)


@dataclass(frozen=True)
class MajorityVote(Strategy):
    """Sign-SGD by majority vote: in lock-step, and not what one device does."""

    workers: int
    rate: float = 0.01

    name = "majority_vote"
    equals_one_device = False

    def refusals(self) -> tuple[Refusal, ...]:
        return (*local_steps(self.name, "every round by votes"), moving_average(self.name))

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return data_parallel_plan(self.name, describe_options(self), self.workers, model, cluster, copies=(2, 0))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        broadcast(context.module, context.group)
        return Replica(context.whole_model(), VotingExchange(self.rate, plan, context))


@dataclass(frozen=True)
class UnguardedVote(Strategy):
    """The same, of which its author says that it does not go in lock-step."""

    workers: int

    name = "unguarded_vote"
    equals_one_device = False
    lock_step = False

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return data_parallel_plan(self.name, describe_options(self), self.workers, model, cluster, copies=(2, 0))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        return Replica(context.whole_model(), VotingExchange(0.01, plan, context))


class VotingExchange(UpdatingExchange):
    """Sums the signs of all workers' gradients, and moves every parameter by the sign of the sum."""

    def __init__(self, rate: float, plan: Plan, context: WorkerContext) -> None:
        self.updater = context.updater_of(plan.segments)
        self.parameter_bytes = context.model.parameter_bytes
        self._rate = rate
        self._clipper = context.clipper()
        self._group = context.group
        self._parameters = [each for each in context.module.parameters() if each.requires_grad]

    def begin(self, round_: int) -> None:
        self.updater.optimizer.zero_grad()

    def synchronize(self, finite: bool = True) -> StepDecision:
        own = [each.grad for each in self._parameters if each.grad is not None]
        return self._clipper.clip(own, own, finite)

    @torch.no_grad()
    def update(self, round_: int) -> None:
        for parameter in self._parameters:
            votes = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.sign()
            self._group.all_reduce(votes)
            parameter.sub_(votes.sign(), alpha=self._rate)


@dataclass(frozen=True)
class Alone(Strategy):
    """Says that it equals one device, and exchanges nothing."""

    workers: int

    name = "alone"
    equals_one_device = True

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return data_parallel_plan(self.name, describe_options(self), self.workers, model, cluster, copies=(2, 0))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        return Replica(context.whole_model(), LocalExchange(plan.segments, context, rank))


RING = partial(references.gossip, near=references.ring)


def ring(fault: str) -> Row:
    near = partial(RING, period=4) if "period 4" in fault else RING
    return Row(partial(Ring, fault=fault), near)


def check_partly_resumes(row: Row, workers: int, folder: Path) -> None:
    """What is seen of a resume where the model is used in part; these have no reference."""
    require_resumes(row, workers, folder, Case(Partial, optimizer=MOMENTUM))


@pytest.mark.parametrize("check", sorted(CHECKS))
@pytest.mark.parametrize(
    "row",
    [
        # What gossip is under its own row.
        pytest.param(ring(""), marks=pytest.mark.full, id="ring"),
        pytest.param(
            Row(MajorityVote, references.majority_vote, leaves_out=frozenset({"statistics"})), id="majority vote"
        ),
    ],
)
def test_without_a_fault_they_keep_their_rows(row: Row, check: str, tmp_path: Path) -> None:
    if check not in row.leaves_out:
        CHECKS[check](row, 4, tmp_path)


FAULTS: dict[str, tuple[Row, Check, str]] = {
    "never steps": (ring("never steps"), check_reference, "the model has not moved: no worker makes a step"),
    "never exchanges": (ring("never exchanges"), check_reference, "it is what workers train that never exchange"),
    "divides by N": (ring("divides by N"), check_reference, "its steps are divided by the number of workers"),
    "loses optimizers": (
        ring("loses the other ranks' optimizers"),
        check_resume,
        "first rank 0.*a rank has lost its own parameters or its optimizer's state",
    ),
    "loses parameters": (
        ring("loses the other ranks' parameters"),
        check_resume,
        "a rank has lost its own parameters or its optimizer's state",
    ),
    "another model": (ring("returns rank 0's model"), check_metrics, "another model was evaluated than is returned"),
    "another model, period 4": (
        ring("returns rank 0's model, period 4"),
        check_reference,
        "5 workers end .* from their reference",
    ),
    "local_shares": (
        ring("local_shares"),
        check_weighed,
        r"with a loss that weighs its examples \(hr.Mean\): give whole_model the local_shares where workers step alone",
    ),
    "statistics": (ring("statistics"), check_statistics, "with BatchNorm, 5 workers end .* from their reference"),
    "anchor": (ring("residual: loses anchor"), check_resume, "after two resumes .* state of the strategy is not saved"),
    "residual": (ring("residual: loses residual"), check_resume, "the resumed run|after two resumes"),
    "unread": (ring("residual: does not read it"), check_resume, "is not saved, or not loaded"),
    "unused": (
        ring("residual: loses what is unused"),
        check_partly_resumes,
        "the resumed run has saved other pieces|after two resumes",
    ),
    "names rank 0": (ring("names rank 0"), check_nonfinite, r"NaN was on ranks \[4\], and the error names rank 0"),
    "takes every option": (ring("takes every option"), check_options, "ema_decay is taken, .* refuse it in refusals"),
    "alone": (Row(Alone), check_reference, "5 workers end .* from their reference"),
    "unguarded": (
        Row(UnguardedVote, references.majority_vote),
        check_left_out_step,
        "rank 4 left out a step, and the run said: .*has lock_step = True",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_row_and_the_message_says_why(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, check, message = FAULTS[fault]
    # Which would find some of them first; the rows also hold for what is not equal on all workers.
    monkeypatch.setattr(EqualityGuard, "compare", lambda guard, evaluates: None)
    with pytest.raises((AssertionError, pytest.fail.Exception)) as failed:
        check(row, 5, tmp_path)
    assert failed.match(f"(?s){message}")


@pytest.mark.parametrize("fault", ["another model", "takes every option", "alone"])
def test_the_guard_of_every_run_finds_copies_that_are_apart(fault: str, tmp_path: Path) -> None:
    row, check, _ = FAULTS[fault]
    with pytest.raises(RanksDiffer, match=r"after \d+ rounds? rank \d has another '0\.weight' \(24 of 24 elements"):
        check(row, 5, tmp_path)
