"""Averages in fewer bits: what a codec loses is owed, and paid later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collectives.seats import together
from headrace.averaging.outer_steps import MeanStep
from headrace.averaging.worker_average import CollectiveAverage
from headrace.collectives.threads import ThreadCollective
from headrace.spec.model import ParameterSpec
from headrace.training.gradients import FlatLayout

LAYOUT = FlatLayout([ParameterSpec("wide", (70, 31), "float64"), ParameterSpec("narrow", (5,), "float32")])
MEETINGS = 12


def moves(rank: int) -> list[list[Tensor]]:
    """How far a rank goes between two meetings, by type."""
    chance = torch.Generator().manual_seed(rank)
    like = parts(torch.zeros(LAYOUT.nbytes, dtype=torch.uint8))
    return [[torch.randn(len(each), generator=chance, dtype=each.dtype) for each in like] for _ in range(MEETINGS)]


def parts(region: Tensor) -> list[Tensor]:
    return [span.of(region) for span in LAYOUT.spans]


def meet(codec: str, weights: list[float], host: ThreadCollective) -> CollectiveAverage:
    average = CollectiveAverage(LAYOUT, host, torch.device("cpu"), MeanStep(), codec)
    average.begin()
    for move in moves(host.rank):
        for own, by in zip(average.elements, move, strict=True):
            own.add_(by)
        average.combine(weights)
        average.apply()
        assert all(bool(own.isfinite().all()) for own in average.elements)
    return average


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.6, 0.3, 0.1]])
def test_what_has_come_and_what_is_owed_is_what_was_sent(weights: list[float]) -> None:
    averages = together(len(weights), lambda host: meet("int8", weights, host))
    for kind, come in enumerate(averages[0].elements):
        for other in averages[1:]:
            assert torch.equal(other.elements[kind], come), "the same bits on all"
        sent = sum(weight * sum(move[kind] for move in moves(rank)) for rank, weight in enumerate(weights))
        # A mean goes down the anchor: what it lost is owed with the other sign.
        owed = sum(weight * parts(each.lost[0])[kind] for weight, each in zip(weights, averages, strict=True))
        answered = sum(parts(each.lost[1])[kind] for each in averages)
        exact = 1e-9 if come.dtype == torch.float64 else 1e-4
        assert float((come - owed - answered - sent).abs().max()) <= exact
        assert 1e-4 < float((come - sent).abs().max()) < 0.1, "what is owed is less than what one meeting loses"


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.6, 0.3, 0.1]])
def test_bf16_is_near_without_owing_anything(weights: list[float]) -> None:
    averages = together(len(weights), lambda host: meet("bf16", weights, host))
    for kind, come in enumerate(averages[0].elements):
        sent = sum(weight * sum(move[kind] for move in moves(rank)) for rank, weight in enumerate(weights))
        assert 1e-4 < float((come - sent).abs().max()) < 0.15
        assert averages[0].lost == ()


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_worker_that_is_left_out_gets_the_mean_and_owes_nothing(codec: str) -> None:
    def act(host: ThreadCollective) -> Tensor:
        average = CollectiveAverage(LAYOUT, host, torch.device("cpu"), MeanStep(), codec)
        average.begin()
        average.elements[0].fill_(float("nan") if host.rank == 1 else 1.0)
        combined = average.combine([0.5, -1.0, 0.5])
        average.apply()
        assert combined.squares[1] == 0.0
        return average.elements[0]

    for own in together(3, act):
        assert float((own - 1.0).abs().max()) < 0.01
