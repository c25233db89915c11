"""Hosts that each list examples of their own."""

from __future__ import annotations

import dataclasses
from itertools import islice

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.data import Hosts, InputPipeline, Loader, from_arrays, local
from headrace.data.pipeline.order import Rounds
from headrace.spec.job import Share

COUNTS = st.lists(st.integers(1, 60), min_size=1, max_size=4)
BATCHES = st.integers(1, 50)
WORKERS = st.integers(1, 3)


def on_hosts(counts: list[int]) -> list[InputPipeline]:
    """Returns what each host has: numbers from 0 on, none on two hosts."""
    firsts = [sum(counts[:host]) for host in range(len(counts))]
    parts = [from_arrays(torch.arange(first, first + count)) for first, count in zip(firsts, counts, strict=True)]
    return [
        dataclasses.replace(local(part.shuffle()), hosts=Hosts(tuple(counts), host)) for host, part in enumerate(parts)
    ]


def rounds_of(counts: list[int], batch: int, workers: int, epochs: int = 2) -> list[list[Share]]:
    """Returns what every worker of every host has in each round."""
    loaders = [
        Loader(pipeline, 0, batch, (1,) * workers, rank) for pipeline in on_hosts(counts) for rank in range(workers)
    ]
    rounds = {loader.rounds_per_epoch for loader in loaders}
    assert len(rounds) == 1
    taken = [list(islice(loader.rounds(), epochs * rounds.pop())) for loader in loaders[:1]]
    taken += [list(islice(loader.rounds(), len(taken[0]))) for loader in loaders[1:]]
    return [list(shares) for shares in zip(*taken, strict=True)]


@given(counts=COUNTS, batch=BATCHES, workers=WORKERS)
def test_every_epoch_visits_every_example_of_every_host_once(counts: list[int], batch: int, workers: int) -> None:
    rounds = rounds_of(counts, batch, workers)
    for epoch in range(2):
        shares = [share for each in rounds for share in each if share.epoch == epoch]
        assert sorted(number for share in shares for number in share.batch[0].tolist()) == list(range(sum(counts)))


@given(counts=COUNTS, batch=BATCHES, workers=WORKERS)
def test_all_know_how_many_a_round_has(counts: list[int], batch: int, workers: int) -> None:
    for shares in rounds_of(counts, batch, workers, epochs=1):
        assert {share.of for share in shares} == {sum(share.examples for share in shares)}


@given(counts=COUNTS, batch=BATCHES)
def test_every_host_takes_in_proportion_to_what_it_has(counts: list[int], batch: int) -> None:
    rounds = [Rounds(len(pipeline), pipeline.hosts, batch) for pipeline in on_hosts(counts)]
    for index in range(len(rounds[0])):
        for count, each in zip(counts, rounds, strict=True):
            start, stop, _ = each.span(index)
            wanted = count / len(each)
            assert len(counts) == 1 or abs((stop - start) - wanted) < 1


def test_the_hosts_shuffle_each_their_own() -> None:
    first, second = on_hosts([20, 20])
    orders = [Loader(part, 0, 40, (1,), 0).portion(0, 0, 1).batch[0] for part in (first, second)]
    assert sorted(orders[0].tolist()) == list(range(20))
    assert orders[0].tolist() != list(range(20))


def test_one_host_is_as_if_nothing_was_said() -> None:
    plain = from_arrays(torch.arange(23)).shuffle()
    for told, untold in zip(
        Loader(local(plain), 0, 5, (1, 1), 1).sweep(), Loader(plain, 0, 5, (1, 1), 1).sweep(), strict=True
    ):
        assert told.batch[0].tolist() == untold.batch[0].tolist()
        assert told.of == untold.of
