"""Random numbers: common ones for samplers, and no number twice for what each rank draws."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.api.plain_script import draws
from headrace.api.plain_script.draws import CommonDraws
from headrace.collectives.threads import ThreadCollective, ThreadGroup

WORLD = 8


@pytest.fixture(autouse=True)
def _processes_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every rank has what this process has; its generators are afterwards as they were."""
    monkeypatch.setattr(CommonDraws, "_gather", lambda _: 2 * [[draws._text(state) for state in draws._states()]])
    before = draws._states()
    yield
    draws._set_states(before)


def draws_of(rank: int) -> CommonDraws:
    group = ThreadCollective(ThreadGroup(1), 0)
    group.rank = rank
    return CommonDraws(group)


def drawn() -> tuple[float, float, float]:
    return torch.rand((), dtype=torch.float64).item(), float(np.random.rand()), random.random()


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def test_ranks_draw_other_numbers_and_samplers_the_same() -> None:
    private: list[tuple[float, ...]] = []
    common, readers = set(), []
    for rank in range(WORLD):
        seed(3)
        both = draws_of(rank)
        private += [drawn() for _ in range(2)]
        with both.drawing():
            first = drawn()
        private.append(drawn())
        with both.drawing():
            common.add((first, drawn()))
        readers += [both.reader_seed(epoch) for epoch in range(WORLD)]
    seed(3)
    assert common == {(drawn(), drawn())}
    for numbers in zip(*private, strict=True):
        assert len(set(numbers)) == 3 * WORLD
    # A reading process of torch adds its number.
    assert len({seed + reader for seed in readers for reader in range(WORLD)}) == WORLD**3


def test_a_script_may_seed_anew() -> None:
    seed(3)
    both = draws_of(0)
    seed(5)
    both.agree()
    with both.drawing():
        common = drawn()
    assert drawn() != common
    seed(5)
    assert drawn() == common


def test_generators_that_differ_between_ranks_stay_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that seeds by its rank has done it itself; the order is rank 0's."""
    seed(3)
    texts = [draws._text(state) for state in draws._states()]
    seed(4)
    mine = [draws._text(state) for state in draws._states()]
    monkeypatch.setattr(CommonDraws, "_gather", lambda _: [texts, mine])
    both = draws_of(1)
    numbers = drawn()
    with both.drawing():
        common = drawn()
    seed(4)
    assert drawn() == numbers
    seed(3)
    assert drawn() == common
