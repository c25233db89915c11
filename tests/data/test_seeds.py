"""No process draws the random numbers of another one: its seed is a hash of who it is, never a sum."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.data.loading.batch_reader import BatchReader
from headrace.data.loading.processes import seed_reader
from headrace.data.pipeline.order import derived, generator
from headrace.worker.state import random_states, restore_random_states

_CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    states = random_states(_CPU)
    yield
    restore_random_states(states, _CPU)


def _drawn() -> list[float]:
    return [*torch.rand(2, dtype=torch.float64).tolist(), *np.random.rand(2).tolist(), random.random()]


def test_no_number_comes_twice_over_ranks_readers_epochs_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(BatchReader, "run", lambda self, parts, seed: (each for each in [seeds.append(seed)] if each))
    pipeline = hr.data.from_arrays(torch.arange(64)).map(lambda example: example).shuffle()
    for seed, rank, epoch, ordered in product(range(2), range(8), range(8), (False, True)):
        loader = hr.data.Loader(pipeline, seed, 16, (1,) * 8, rank, ordered=ordered)
        assert next(loader.rounds(4 * epoch), None) is None
    numbers: list[float] = []
    for seed, reader in product(seeds, range(1, 9)):
        seed_reader(seed, reader)
        numbers += _drawn()
    assert len(numbers) == 2 * 8 * 8 * 2 * 8 * 5
    assert len(set(numbers)) == len(numbers)


def test_workers_of_neighbouring_seeds_draw_other_numbers() -> None:
    seeds = [derived(*name) for name in product(range(8), range(8), range(8), range(2))]
    assert len(set(seeds)) == len(seeds)
    # As they were: a run that goes on must draw what it drew.
    assert (derived(0, 0, 0, 0), derived(3, 1, 0, 0)) == (16363712187084821697, 8578735538079734962)


def test_hosts_that_number_their_examples_alike_draw_other_numbers() -> None:
    pipeline = hr.data.from_arrays(torch.zeros(8)).map(lambda pair, rng: (pair[0] + rng.random(),))
    drawn = []
    for mine in range(2):
        local = hr.data.local(pipeline)
        local = type(local)(**{**vars(local), "hosts": hr.data.Hosts((8, 8), mine)})
        (share,) = hr.data.Loader(local, 0, 16, (1,), 0).sweep(alone=True)
        drawn += share.batch[0].tolist()
    assert len(set(drawn)) == 16
    assert drawn[0] == pytest.approx(generator(0, 0, 0).random())
