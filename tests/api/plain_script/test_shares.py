"""Shares of batches: together they are the user's batches, in the order of the user's samplers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from api.plain_script.plain_runs import on_ranks, said
from headrace.api.plain_script.draws import CommonDraws
from headrace.api.plain_script.meeting import Meeting
from headrace.api.plain_script.shares import ShareLoader, let_others_draw
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data.pipeline.collator import count_in
from headrace.errors import UsageError

NUMBERS = TensorDataset(torch.arange(22))


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(4)


class Hardest(Sampler[int]):
    """An order of one's own, of less than all."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 4, 15, 9, 2, 6, 5, 3])

    def __len__(self) -> int:
        return 9


class Buckets(Sampler[list[int]]):
    """Batches of several sizes, in another order each time."""

    def __init__(self) -> None:
        self.drawn = drawn()

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(22, generator=self.drawn).tolist()
        yield from (order[:1], order[1:6], order[6:17], order[17:])

    def __len__(self) -> int:
        return 4


class Stream(IterableDataset[Any]):
    """Examples in an order of its own, of which reading processes divide the places."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[Tensor]:
        reader = get_worker_info()
        start, step = (reader.id, reader.num_workers) if reader else (0, 1)
        places = range(self.first, 22, self.step)[start::step]
        return map(torch.tensor, random.sample(places, len(places)))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(NUMBERS, 5),
    "shuffled": lambda: DataLoader(NUMBERS, 5, shuffle=True, generator=drawn()),
    "without the last": lambda: DataLoader(NUMBERS, 5, shuffle=True, generator=drawn(), drop_last=True),
    "own": lambda: DataLoader(NUMBERS, 4, sampler=Hardest()),
    "batches": lambda: DataLoader(NUMBERS, batch_sampler=Buckets()),
    "chosen batches": lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(Hardest(), 2, True)),
    "weighted": lambda: DataLoader(
        NUMBERS, 6, sampler=WeightedRandomSampler(torch.arange(1.0, 23), 30, generator=drawn())
    ),
    "part": lambda: DataLoader(NUMBERS, 4, sampler=SubsetRandomSampler(range(3, 17), generator=drawn())),
    "repeated": lambda: DataLoader(
        NUMBERS, 4, sampler=RandomSampler(NUMBERS, replacement=True, num_samples=33, generator=drawn())
    ),
    "of a list": lambda: DataLoader(list(range(22)), 5),  # type: ignore[arg-type]
}


def seen(batch: Any) -> list[int]:
    values: Tensor = batch[0] if isinstance(batch, list) else batch
    return values.tolist()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_shares_are_the_batches_of_the_loader_alone(kind: str, world: int) -> None:
    alone = LOADERS[kind]()
    expected = [[seen(batch) for batch in alone] for _ in range(2)]

    def read(meeting: Meeting) -> list[list[list[int]]]:
        shares = ShareLoader(LOADERS[kind](), meeting)
        assert len(shares) == len(alone)
        return [[seen(batch) for batch in shares] for _ in range(2)]

    of_ranks: list[Any] = on_ranks(read, world)
    for number, batches in enumerate(expected):
        for place, batch in enumerate(batches):
            parts = [shares[number][place] for shares in of_ranks]
            assert list(chain(*parts)) == batch
            sizes = list(map(len, parts))
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("readers", [0, 2])
def test_a_stream_is_divided_in_the_order_of_the_script_alone(readers: int) -> None:
    def read(meeting: Meeting | None) -> list[list[int]]:
        torch.manual_seed(6), random.seed(6)
        loader = DataLoader(Stream(), 8, num_workers=readers)
        return [seen(batch) for _ in range(2) for batch in (ShareLoader(loader, meeting) if meeting else loader)]

    expected = read(None)

    def alone(meeting: Meeting) -> list[list[int]]:
        # One rank after the other, since all have this process's generators.
        for rank in range(meeting.world):
            if rank == meeting.rank:
                meeting.meet = lambda *_: [1]  # type: ignore[method-assign]
                found = read(meeting)
            meeting.group.barrier()
        return found

    of_ranks: list[Any] = on_ranks(alone, 3)
    assert [list(chain(*parts)) for parts in zip(*of_ranks, strict=True)] == expected
    assert all(max(map(len, parts)) - min(map(len, parts)) <= 1 for parts in zip(*of_ranks, strict=True))


def test_streams_that_ranks_have_divided_are_named() -> None:
    def read(meeting: Meeting) -> None:
        for _ in ShareLoader(DataLoader(Stream(meeting.rank, 2), 4), meeting):
            meeting.meet(0)

    assert "rank 1 has taken other examples than rank 0 until batch 0 of iteration 0" in said(on_ranks(read))


@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_that_are_not_divided_leave_the_order_as_it_is_alone(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (DataLoader, RandomSampler):
        monkeypatch.setattr(kind, "__iter__", kind.__iter__)
    # One rank alone has the same generators as all ranks.
    monkeypatch.setattr(CommonDraws, "agree", lambda _: None)

    def orders(meeting: Meeting | None) -> list[list[int]]:
        torch.manual_seed(3)
        train: Any = DataLoader(NUMBERS, 4, shuffle=True)
        test = DataLoader(NUMBERS, 6, shuffle=shuffle)
        if meeting:
            train = ShareLoader(train, meeting)
            meeting.part()
            let_others_draw(meeting)
        return [seen(batch) for _ in range(3) for loader in (train, test) for batch in loader]

    states = torch.get_rng_state(), random.getstate()
    expected = orders(None)
    assert orders(Meeting(ThreadCollective(ThreadGroup(1), 0))) == expected
    torch.set_rng_state(states[0]), random.setstate(states[1])


def test_an_iteration_may_be_left_and_another_begun_inside() -> None:
    def pairs(batches: Any) -> list[list[int]]:
        found = []
        for place, batch in enumerate(batches):
            found.append(seen(batch))
            for inner in batches:
                found.append(seen(inner))
                if len(found) % 3 == 0:
                    break
            if place == 2:
                break
        return [*found, seen(next(iter(batches)))]

    def build() -> DataLoader[Any]:
        return DataLoader(NUMBERS, 4, shuffle=True, generator=drawn())

    first, second = on_ranks(lambda meeting: pairs(ShareLoader(build(), meeting)))
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert [a + b for a, b in zip(first, second, strict=True)] == pairs(build())


def test_a_loader_keeps_its_attributes() -> None:
    loader = DataLoader(NUMBERS, 4, shuffle=True, drop_last=True)
    (shares,) = on_ranks(lambda meeting: ShareLoader(loader, meeting), 1)
    assert isinstance(shares, ShareLoader)
    assert len(shares.dataset) == 22
    assert (shares.batch_size, shares.drop_last, shares.num_workers) == (4, True, 0)
    assert shares.sampler is loader.sampler
    shares.collate_fn = len
    assert loader.collate_fn is len
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = shares.no_such_thing


def test_a_distributed_sampler_gives_its_order_of_all_examples() -> None:
    for shuffle in (True, False):
        for epoch in (0, 3):
            whole = DistributedSampler(NUMBERS, 1, 0, shuffle=shuffle, seed=2)
            whole.set_epoch(epoch)

            def read(meeting: Meeting | None, rank: int, shuffle: bool = shuffle, epoch: int = epoch) -> list[int]:
                sampler = DistributedSampler(NUMBERS, 2, rank, shuffle=shuffle, seed=2)
                shares = ShareLoader(DataLoader(NUMBERS, 4, sampler=sampler), meeting)
                shares.sampler.set_epoch(epoch)
                return [number for batch in shares for number in sorted(seen(batch))]

            of_ranks: list[Any] = on_ranks(lambda meeting, read=read: read(meeting, meeting.rank))  # type: ignore[misc]
            assert sorted(chain(*of_ranks)) == list(range(22))
            assert sorted(read(None, 0)) == list(range(22))
            assert set(of_ranks[0][:2]) | set(of_ranks[1][:2]) == set(list(whole)[:4])


class Rest(DistributedSampler[int]):
    """One of the user's own."""


class Endless(DataLoader[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(NUMBERS, batch_size=None), "no batch_size"),
        (DataLoader(NUMBERS, 4, sampler=Rest(NUMBERS, 2, 0)), "Rest takes one rank's part of the data"),  # type: ignore[arg-type]
        (Endless(NUMBERS, 4), "Endless iterates in a way of its own"),
        ([1, 2], "the loader is a list"),
    ],
)
def test_what_cannot_be_divided_is_refused(loader: Any, message: str) -> None:
    assert message in said(on_ranks(lambda meeting: ShareLoader(loader, meeting), 2))


class RankSampler(Sampler[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 22, 2))

    def __len__(self) -> int:
        return 11


def test_ranks_that_take_other_examples_are_named() -> None:
    def read(meeting: Meeting) -> None:
        for _ in ShareLoader(DataLoader(NUMBERS, 4, sampler=RankSampler(meeting.rank)), meeting):
            meeting.meet(0)

    assert "rank 1 has taken other examples than rank 0 until batch 0 of iteration 0" in said(on_ranks(read))


def test_a_rank_that_looks_at_a_batch_alone_is_named() -> None:
    def read(meeting: Meeting) -> None:
        shares = ShareLoader(DataLoader(NUMBERS, 4), meeting)
        if meeting.rank == 0:
            next(iter(shares))
        meeting.meet(0)

    assert "rank 1 is at loss.backward()" in said(on_ranks(read))


def weights_of(read: Callable[[Any], Iterator[Any]], count: int) -> list[Any]:
    """Returns what every rank's backward passes are weighted by, one after each thing that `read` yields."""

    def act(meeting: Meeting) -> list[tuple[int, int]]:
        data = TensorDataset(torch.arange(count))
        found = []
        for _ in read(ShareLoader(DataLoader(data, 8), meeting)):
            share = meeting.deliveries.current()
            assert share is not None
            found.append((share.examples, share.of))
        return found

    return on_ranks(act)


def ahead(shares: Any) -> Iterator[Any]:
    batches = iter(shares)
    batch = next(batches)
    while batch is not None:
        current, batch = batch, next(batches, None)
        yield current


def listed(shares: Any) -> Iterator[Any]:
    every = list(shares)
    yield from every


def cycled(shares: Any) -> Iterator[Any]:
    every = []
    for batch in shares:
        every.append(batch)
        yield batch
    yield from every


def looked_at_first(shares: Any) -> Iterator[Any]:
    sample, kept = next(iter(shares)), []
    for batch in shares:
        yield batch
        # A second pass of the same batch, and one after the last.
        yield batch
        kept.append(batch)
    kept.clear()
    yield batch
    assert len(sample) == 1


@pytest.mark.parametrize("read", [ahead, listed, cycled])
def test_a_share_that_is_not_sure_is_refused_where_it_matters(read: Any) -> None:
    even = weights_of(read, 24)
    assert even[0] == [(4, 8)] * len(even[0])
    assert "which of them the loss is of is not known" in said(weights_of(read, 21))


def test_a_pass_is_of_the_last_share() -> None:
    first, second = weights_of(looked_at_first, 21)
    assert first == [(4, 8)] * 4 + [(3, 5)] * 3 or first == [(4, 8)] * 4 + [(2, 5)] * 3
    assert second == [(4, 8)] * 4 + [(5 - first[-1][0], 5)] * 3


class Pairs(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), torch.rand(())

    def __len__(self) -> int:
        return 24


@pytest.mark.slow
def test_reading_processes_draw_other_numbers_on_each_rank_and_in_each_iteration() -> None:
    def read(meeting: Meeting) -> list[float]:
        meeting.reader_seed = lambda common: common // 2 + 1000 * meeting.rank  # type: ignore[method-assign]
        loader = DataLoader(Pairs(), 4, num_workers=2, generator=drawn(), persistent_workers=False)
        shares = ShareLoader(loader, meeting)
        return [number for _ in range(3) for _, numbers in shares for number in numbers.tolist()]

    first, second = on_ranks(read)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert len({*first, *second}) == 2 * 3 * 12


def dropping(examples: list[Any]) -> Any:
    """Leaves out what is broken."""
    whole = [number for (number,) in examples if number % 3]
    return torch.stack(whole) if whole else None


def test_a_batch_counts_by_what_its_collate_function_leaves() -> None:
    def read(meeting: Meeting) -> list[int]:
        counts = []
        for _ in ShareLoader(DataLoader(NUMBERS, 8, collate_fn=dropping), meeting):
            share = meeting.deliveries.current()
            counts.append(share.examples if share else -1)
        return counts

    assert on_ranks(read) == [[2, 3, 2], [3, 2, 2]]


def test_alone_a_loader_is_as_it_was() -> None:
    for sampler in (None, SequentialSampler(NUMBERS)):
        torch.manual_seed(2)
        shares = ShareLoader(DataLoader(NUMBERS, 4, shuffle=sampler is None, sampler=sampler))
        found = [seen(batch) for _ in range(2) for batch in shares]
        torch.manual_seed(2)
        loader = DataLoader(NUMBERS, 4, shuffle=sampler is None, sampler=sampler)
        assert found == [seen(batch) for _ in range(2) for batch in loader]
    with pytest.raises(UsageError, match="no batch_size"):
        ShareLoader(DataLoader(NUMBERS, batch_size=None))


def test_as_many_features_as_examples_do_not_count_as_examples() -> None:
    left = [torch.zeros(3, 4), torch.zeros(3, 1)]
    assert count_in(left, 4, 4)[0] == 3
