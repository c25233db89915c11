"""What a worker keeps of numpy's global generator between two rounds is what numpy says, however it is used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from headrace.machine.generators import random_states
from headrace.worker.loops.members import MemberChanges, _Before, _NumpyState

USES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "uniform": lambda: np.random.rand(3),
    # Every second one comes from a pair that is there.
    "normal": lambda: np.random.randn(),
    "permutation": lambda: np.random.permutation(5),
    "seed": lambda: np.random.seed(7),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, generator = np.random.get_state(), np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(generator)
    np.random.set_state(before)


def check(kept: _NumpyState) -> None:
    np.testing.assert_equal(kept.read(), np.random.get_state(legacy=False))


@pytest.mark.parametrize("name", USES)
def test_it_is_the_present_state_after_every_use(name: str) -> None:
    np.random.seed(1)
    kept = _NumpyState()
    for _ in range(5):
        check(kept)
        USES[name]()
    for each in (*USES.values(), *USES.values()):
        each()
        check(kept)


def test_it_is_asked_for_again_only_where_it_has_changed() -> None:
    np.random.seed(1)
    kept = _NumpyState()
    first = kept.read()
    assert kept.read() is first
    np.random.rand()
    assert kept.read() is not first


def test_a_generator_of_another_kind_is_kept_too() -> None:
    np.random.set_bit_generator(np.random.PCG64(3))
    kept = _NumpyState()
    for _ in range(3):
        check(kept)
        np.random.rand()


def test_a_round_that_comes_again_draws_the_same_numbers() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    generators = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False), random_states()
    own = SimpleNamespace(heartbeat=SimpleNamespace(examples=9))
    session = SimpleNamespace(
        rank=0,
        page=SimpleNamespace(ranks=[own]),
        progress=SimpleNamespace(round=7, examples=64),
        replica=SimpleNamespace(compute=SimpleNamespace(module=torch.nn.Identity())),
    )
    elastic = SimpleNamespace(bring_back=lambda: None)
    changes = SimpleNamespace(_before=_Before(5, [], {}, generators, (32, 4)), _session=session, _elastic=elastic)
    drawn = draw()
    MemberChanges._bring_back(cast("MemberChanges", changes))
    assert draw() == drawn
    assert (session.progress.round, session.progress.examples, own.heartbeat.examples) == (4, 32, 4)
