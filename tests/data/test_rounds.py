"""Hosts that each list examples of their own."""

from __future__ import annotations

import dataclasses
from itertools import chain, islice

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.data import Hosts, InputPipeline, Loader, from_arrays, local
from headrace.data.pipeline.order import Rounds
from headrace.errors import DataError
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


@given(counts=COUNTS, batch=BATCHES, workers=WORKERS)
def test_without_the_last_batch_all_have_whole_ones(counts: list[int], batch: int, workers: int) -> None:
    assume(sum(counts) >= batch)
    parts = [part.batch(drop_last=True) for part in on_hosts(counts)]
    loaders = [Loader(part, 0, batch, (1,) * workers, rank) for part in parts for rank in range(workers)]
    assert {loader.rounds_per_epoch for loader in loaders} == {sum(counts) // batch}
    for epoch in range(2):
        shares = [list(loader.rounds(epoch * (n := loader.rounds_per_epoch), (epoch + 1) * n)) for loader in loaders]
        numbers = [number for each in shares for share in each for number in share.batch[0].tolist()]
        assert len(numbers) == len({*numbers})
        assert sum(counts) // batch * batch - len(counts) < len(numbers) <= sum(counts) // batch * batch
        for each in zip(*shares, strict=True):
            assert {share.of for share in each} == {sum(share.examples for share in each)}
            assert len(counts) > 1 or sum(share.examples for share in each) == batch


def test_what_is_left_out_differs_from_epoch_to_epoch() -> None:
    lengths = list(range(22))
    for pipeline in (from_arrays(torch.arange(22)), from_arrays(torch.arange(22)).batch(lengths=lengths)):
        kept = dataclasses.replace(pipeline, batching=dataclasses.replace(pipeline.batching, drop_last=True))
        loader = Loader(kept.shuffle(), 0, 5, (1,), 0)
        numbers = [share.batch[0].tolist() for share in islice(loader.rounds(), 40)]
        left = [{*range(22)} - {*chain.from_iterable(numbers[start : start + 4])} for start in range(0, 40, 4)]
        assert all(len(each) == 2 for each in left)
        assert len({*map(frozenset, left)}) > 3
        # Not those that are longest.
        assert min(min(each) for each in left) < 11
    assert sum(share.examples for share in Loader(kept, 0, 5, (1,), 0, ordered=True).sweep()) == 22


def test_all_left_out_is_an_error() -> None:
    with pytest.raises(DataError, match=r"leaves out all 4 examples, as a batch has 5; use a smaller"):
        Loader(from_arrays(torch.arange(4)).batch(drop_last=True), 0, 5, (1,), 0)


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
