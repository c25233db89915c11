"""Numbers that are none: found in the round in which they come up, by all ranks alike, before they do harm."""

from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from headrace.data import Loader
from headrace.spec.job import Share
from headrace.training.clipping import StepDecision
from headrace.training.exchange import Replica
from headrace.training.optimizer import StatePiece
from headrace.training.update import PARAMETER
from late import Late
from strategies.contract_models import Case, Partial, dense
from strategies.contract_runs import Saved, held, step, with_replicas
from strategies.test_contract import ROWS
from strategies.test_state import SYNCHRONOUS

fsdp = Late("torch.distributed.fsdp")
COUNT = 12
"""Three rounds of four examples an epoch: every worker has its share of each."""
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 1e150, "-huge": -1e150}


def weighed(output: Tensor, target: Tensor) -> hr.Mean:
    weights = 1.0 + target
    return hr.Mean((F.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())


CASES = {
    "plain": Case(dense),
    "adam-partial": Case(Partial, optimizer=lambda named: torch.optim.Adam(named, lr=0.01)),
    "accumulate": Case(dense, options=hr.Options(accumulate=2)),
    "mean-accumulate": Case(dense, loss=weighed, options=hr.Options(accumulate=2)),
    "clip-norm": Case(dense, options=hr.Options(clip_norm=0.5, ema_decay=0.9)),
    "clip-value": Case(dense, options=hr.Options(clip_value=0.1)),
    "clip-both": Case(Partial, options=hr.Options(clip_value=0.1, clip_norm=0.2, accumulate=2)),
}


@dataclass(frozen=True)
class Poison:
    """What goes wrong in one round.

    Attributes:
        rank: whose contribution.
        place: "loss", or where it is in the gradient, as a part of all its elements.
        value: one of `VALUES`.
    """

    rank: int
    place: str | float
    value: str

    @property
    def verdict(self) -> StepDecision:
        """What all must say."""
        if self.value.endswith("huge"):
            return StepDecision()
        return StepDecision(False, (self.rank,) if self.place == "loss" else ())


def poisons(count: int, workers: int, seed: int) -> list[Poison]:
    chance = random.Random(seed)
    places = [chance.choice(["loss", chance.random()]) for _ in range(count)]
    values = [chance.choice(sorted(VALUES)) for _ in range(count)]
    # A loss that is huge is a gradient that is infinite.
    values = ["nan" if place == "loss" else value for place, value in zip(places, values, strict=True)]
    return [Poison(chance.randrange(workers), *what) for what in zip(places, values, strict=True)]


class Syringe:
    """Changes one element of one gradient while backward runs, or an input."""

    def __init__(self, module: nn.Module) -> None:
        # Parts of parameters get no gradient from backward; all ranks come here together, and gather whole ones.
        sharded = [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]
        for part in sharded:
            part.unshard()
        # `extra` has a gradient in some rounds alone.
        named = [(n, p) for n, p in module.named_parameters() if p.numel() and not n.startswith("extra")]
        self._owners = [(index, element) for index, (_, p) in enumerate(named) for element in range(p.numel())]
        self._where, self._value = (-1, 0), 0.0
        for index, (_, parameter) in enumerate(named):
            parameter.register_hook(lambda gradient, index=index: self._prick(index, gradient))
        for part in sharded:
            part.reshard()

    def fill(self, poison: Poison, share: Share) -> Share:
        """Returns what is trained on in this round."""
        self._value = VALUES[poison.value]
        if isinstance(poison.place, float):
            self._where = self._owners[int(poison.place * len(self._owners))]
            return share
        inputs, target = share.batch
        inputs = inputs.clone()
        inputs[0, 1] = self._value
        return dataclasses.replace(share, batch=(inputs, target))

    def empty(self) -> None:
        self._where = (-1, 0)

    def _prick(self, index: int, gradient: Tensor) -> Tensor:
        if index != self._where[0]:
            return gradient
        poisoned = gradient.clone()
        poisoned.view(-1)[self._where[1]] = self._value
        return poisoned


def same(one: Saved, other: Saved) -> bool:
    """Whether weights, averages and optimizer state are equal bit for bit."""
    pieces = zip(one.pieces, other.pieces, strict=True)
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items()) and all(
        torch.equal(a.value, b.value) for a, b in pieces
    )


def weights(saved: Saved) -> list[StatePiece]:
    return [StatePiece(name, PARAMETER, 0, tensor.flatten()) for name, tensor in saved.tensors.items()]


def suffer(every: Sequence[Poison], rank: int, replica: Replica, loader: Loader) -> list[StepDecision]:
    """Goes through poisoned and sound rounds in turn; returns the verdicts on the poisoned ones."""
    syringe = Syringe(replica.compute.module)
    verdicts = []
    shares = loader.rounds()
    for number, poison in enumerate(every):
        assert step(replica, next(shares), 2 * number) == StepDecision()
        before = held(replica)
        assert all(tensor.isfinite().all() for tensor in before.tensors.values())
        share = next(shares)
        verdicts.append(step(replica, syringe.fill(poison, share) if poison.rank == rank else share, 2 * number + 1))
        syringe.empty()
        if verdicts[-1].apply:
            assert not same(held(replica), before)
            replica.load([*before.pieces, *weights(before)])  # huge weights are nothing to go on with
        assert same(held(replica), before)
    shares.close()
    return verdicts


def poisoned(case: Case, name: str, workers: int, every: Sequence[Poison]) -> list[list[StepDecision]]:
    return with_replicas(case.job(COUNT), ROWS[name].make(workers), workers, partial(suffer, every))


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "workers"), SYNCHRONOUS)
@pytest.mark.parametrize("case", sorted(CASES))
def test_what_is_not_finite_is_found_by_all_and_changes_nothing(name: str, workers: int, case: str) -> None:
    every = poisons(12, workers, seed=7)
    assert {poison.verdict.apply for poison in every} == {True, False}
    assert poisoned(CASES[case], name, workers, every) == [[poison.verdict for poison in every]] * workers


@pytest.mark.parametrize("case", ["plain", "clip-both"])
def test_by_a_wire_too(case: str) -> None:
    every = poisons(12, 2, seed=7)
    strategy = hr.Mirrored(2, overlap=False)
    verdicts = with_replicas(CASES[case].job(COUNT), strategy, 2, partial(suffer, every), wired=True)
    assert verdicts == [[poison.verdict for poison in every]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), SYNCHRONOUS)
def test_of_hundreds_of_poisons_none_reaches_a_parameter(
    name: str, workers: int, request: pytest.FixtureRequest
) -> None:
    count = int(os.environ.get("HEADRACE_POISONS", 400 if request.config.getoption("--full") else 100))
    every = poisons(count, workers, seed=workers)
    assert sum(not poison.verdict.apply for poison in every) > 0.6 * count
    assert poisoned(CASES["plain"], name, workers, every) == [[poison.verdict for poison in every]] * workers
