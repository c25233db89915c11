"""The order of an epoch and the random numbers of an example."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.pipeline.order import Bucketed, ExampleOrder, _Scatter, generator, permutation

ORDER_0_0 = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
ORDER_7_3 = [2, 8, 9, 4, 0, 6, 7, 5, 1, 3]
SCATTERED_0_0 = [8, 3, 1, 7, 2, 0, 6, 9, 4, 5]
FAR_7_3 = [2142610, 1755503, 6665457, 5787656]
SEEDS = st.integers(min_value=-(2**70), max_value=2**70)


@given(count=st.integers(1, 500), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_order_is_a_permutation_and_a_function_of_seed_and_epoch(count: int, seed: int, epoch: int) -> None:
    order = permutation(count, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == permutation(count, seed, epoch).tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_the_same_on_every_machine() -> None:
    assert permutation(10, seed=0, epoch=0).tolist() == ORDER_0_0
    assert permutation(10, seed=7, epoch=3).tolist() == ORDER_7_3


def test_every_place_is_equally_likely() -> None:
    counts = np.zeros((6, 6))
    for epoch in range(3000):
        counts[np.arange(6), permutation(6, seed=1, epoch=epoch)] += 1
    # 500 expected in each cell with a standard deviation of 20.
    assert np.abs(counts - 500).max() < 110


@given(seed=SEEDS, epoch=st.integers(0, 2**40), index=st.integers(0, 2**40), transform=st.integers(0, 5))
def test_random_numbers_are_a_function_of_their_place(seed: int, epoch: int, index: int, transform: int) -> None:
    here = generator(seed, epoch, index, transform).integers(2**62, size=3).tolist()
    assert here == generator(seed, epoch, index, transform).integers(2**62, size=3).tolist()
    for other in (
        generator(seed + 1, epoch, index, transform),
        generator(seed, epoch + 1, index, transform),
        generator(seed, epoch, index + 1, transform),
        generator(seed, epoch, index, transform + 1),
    ):
        assert here != other.integers(2**62, size=3).tolist()


@given(count=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_a_scattered_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    scatter = _Scatter(count, seed, epoch)
    assert sorted(scatter(np.arange(count)).tolist()) == list(range(count))


def test_a_scattered_order_looks_random() -> None:
    counts = np.zeros((6, 6))
    neighbours, correlations = [], []
    for epoch in range(3000):
        counts[np.arange(6), _Scatter(6, 1, epoch)(np.arange(6))] += 1
    for epoch in range(200):
        order = _Scatter(1000, 3, epoch)(np.arange(1000))
        neighbours.append((np.abs(np.diff(order)) == 1).sum())
        correlations.append(np.corrcoef(order[:-1], order[1:])[0, 1])
    assert np.abs(counts - 500).max() < 110
    # 2 expected, with a standard deviation of the mean of 0.1; and 0, of 0.0022.
    assert abs(np.mean(neighbours) - 2) < 0.5
    assert abs(np.mean(correlations)) < 0.011


def test_a_scattered_order_is_the_same_on_every_machine() -> None:
    assert _Scatter(10, 0, 0)(np.arange(10)).tolist() == SCATTERED_0_0
    assert ExampleOrder(10_000_000, 7, 3).slice(5_000_000, 5_000_004).tolist() == FAR_7_3


@pytest.mark.each_value
@pytest.mark.parametrize("count", [50, 1 << 20, (1 << 20) + 1, pytest.param(3_000_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_an_order_is_read_in_pieces_from_anywhere(count: int, shuffled: bool) -> None:
    whole = ExampleOrder(count, 1, 2, shuffled).slice(0, count)
    assert len(np.unique(whole)) == count
    order = ExampleOrder(count, 1, 2, shuffled)
    for start, stop in ((count - 7, count), (0, 40), (count // 2, count // 2 + 20), (count // 3, count)):
        assert np.array_equal(order.slice(start, stop), whole[start:stop])
        assert order.at(start) == whole[start]
    assert order.slice(5, 5).tolist() == []


def test_threads_that_read_one_order_do_not_disturb_each_other() -> None:
    count = 2_000_000
    order, whole = ExampleOrder(count, 1, 0), ExampleOrder(count, 1, 0).slice(0, count)
    starts = np.random.default_rng(0).integers(0, count - 300, 400).tolist()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda start: order.slice(start, start + 300), starts))
    assert all(np.array_equal(piece, whole[start : start + 300]) for start, piece in zip(starts, found, strict=True))


@given(st.data(), st.integers(1, 200), st.integers(1, 20), st.integers(1, 5), st.integers(0, 3))
def test_batches_of_one_length_are_a_permutation_and_begin_anywhere(
    data: st.DataObject, count: int, batch: int, window: int, epoch: int
) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)))

    def bucketed() -> Bucketed:
        return Bucketed(ExampleOrder(count, 5, epoch), count, lengths, batch, window, 5, epoch)

    whole = bucketed().slice(0, count)
    assert sorted(whole.tolist()) == list(range(count))
    start = data.draw(st.integers(0, count))
    assert bucketed().slice(start, count).tolist() == whole[start:].tolist()
    size = batch * window
    for first in range(0, count, size):
        rows = [lengths[whole[at : at + batch]] for at in range(first, min(first + size, count), batch)]
        # What is shorter than a batch stays the last, and has the longest.
        for one in rows:
            for other in rows:
                assert one.max() <= other.min() or other.max() <= one.min() or set(one) & set(other)
