"""Ranks that compare their tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from collectives.seats import together
from headrace.collectives.equality import Difference, find_difference
from headrace.collectives.threads import ThreadCollective


def tensors_of(host: ThreadCollective, odd: int, **changed: float) -> list[tuple[str, Tensor]]:
    values = {"a": torch.zeros(()), "b": torch.ones(2, 3), "c": torch.arange(4), "d": torch.ones(0)}
    if host.rank == odd:
        for name, value in changed.items():
            values[name].view(-1)[-1] = value
    return list(values.items())


def test_ranks_that_are_alike_have_no_difference() -> None:
    assert together(3, lambda host: find_difference(tensors_of(host, -1), host)) == [None] * 3
    assert together(2, lambda host: find_difference([], host)) == [None] * 2


@pytest.mark.parametrize(("world", "odd"), [(2, 1), (3, 0), (3, 2), (5, 3)])
def test_the_rank_that_is_not_like_the_others_is_named(world: int, odd: int) -> None:
    def act(host: ThreadCollective) -> Difference | None:
        return find_difference(tensors_of(host, odd, b=1.5, c=9), host)

    # Of two that differ from each other, the first is taken for right.
    expected = Difference("b", odd, int(odd == 0), elements=1, of=6, largest=0.5)
    assert together(world, act) == [expected] * world
    assert str(expected) == "'b' (1 of 6 elements, by up to 0.5)"


def test_what_rounding_explains_is_no_difference_and_more_is() -> None:
    def act(host: ThreadCollective) -> list[Difference | None]:
        tensors = tensors_of(host, 1, b=1.0001, c=4)
        return [find_difference(tensors, host, rounding) for rounding in (1e-3, 0.5, 0.0)]

    for rough, rougher, exact in together(3, act):
        assert rough == Difference("c", 1, 0, elements=1, of=4, largest=1.0)
        assert rougher is None
        assert exact is not None
        assert exact.name == "b"


def test_the_last_bit_is_a_difference() -> None:
    above = math.nextafter(1.0, 2.0)

    def act(host: ThreadCollective) -> Difference | None:
        value = above if host.rank else 1.0
        return find_difference([("x", torch.tensor([value, value], dtype=torch.float64))], host)

    assert together(2, act) == [Difference("x", 1, 0, elements=2, of=2, largest=above - 1.0)] * 2


def test_nan_is_a_difference_from_a_number_and_none_from_itself() -> None:
    def act(host: ThreadCollective) -> tuple[Difference | None, Difference | None]:
        return (
            find_difference([("x", torch.tensor(math.nan))], host),
            find_difference([("x", torch.tensor(math.nan if host.rank else 1.0))], host),
        )

    for same, differs in together(2, act):
        assert same is None
        assert differs is not None
        assert (differs.elements, math.isnan(differs.largest)) == (1, True)
