"""Outer steps beside those of DiLoCo and EASGD: what their papers compute, and what `verify` knows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from strategies.contract_models import COUNTS
from strategies.contract_runs import distance, train
from strategies.test_parameter_averaging import CASES, MEAN, OuterSGD, by_hand, taken


class OuterMoments:
    """Reddi et al., 2021, algorithm 2, with both moments 0 at first; `follow` is the line of the second moment."""

    def __init__(self, follow: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._follow = follow
        self._by_first: dict[int, list[Tensor]] = {}

    def begin(self, models: list[nn.Module]) -> None:
        for parameter in models[0].parameters():
            now = parameter.detach().clone()
            self._by_first[id(parameter)] = [now, torch.zeros_like(now), torch.zeros_like(now)]

    def step(self, tensors: tuple[Tensor, ...], mean: Tensor) -> None:
        now, first, second = self._by_first[id(tensors[0])]
        way = mean - now
        first = 0.9 * first + 0.1 * way
        second = self._follow(second, way**2)
        now = now + 0.05 * first / (torch.sqrt(second) + 1e-3)
        self._by_first[id(tensors[0])] = [now, first, second]
        taken(tensors, now)


OUTERS: dict[str, tuple[hr.OuterStep, Any]] = {
    "momentum": (hr.Momentum(0.8, 0.6), OuterSGD(lr=0.8, momentum=0.6)),
    "fed_adam": (hr.FedAdam(0.05), OuterMoments(lambda v, square: 0.99 * v + 0.01 * square)),
    "fed_yogi": (hr.FedYogi(0.05), OuterMoments(lambda v, square: v - 0.01 * square * torch.sign(v - square))),
    "fed_adagrad": (hr.FedAdagrad(0.05), OuterMoments(lambda v, square: v + square)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", OUTERS)
@pytest.mark.parametrize(("workers", "period"), [(2, 3), (3, 2)])
def test_outer_steps_are_those_of_their_papers(name: str, workers: int, period: int) -> None:
    outer, paper = OUTERS[name]
    job = CASES["mlp"].job(COUNTS["uneven"])
    outcome = train(job, hr.LocalSGD(workers, period=period, outer=outer))
    reference = by_hand(job, workers, period, {"begin": paper.begin, "step": paper.step})
    assert distance(outcome.tensors, reference) <= 1e-12
    assert distance(outcome.tensors, by_hand(job, workers, period, MEAN)) > 1e-3


@pytest.mark.parametrize("outer", [hr.Momentum(), hr.FedYogi(), hr.Nesterov()])
def test_verify_knows_outer_steps(outer: hr.OuterStep) -> None:
    job = CASES["mlp"].job(COUNTS["uneven"])
    assert hr.verify(job, hr.ParameterAveraging(2, period=2, outer=outer), engine=hr.ThreadEngine()).equal
