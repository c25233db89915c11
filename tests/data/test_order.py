"""The order of an epoch and the random numbers of an example."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.order import generator, permutation

ORDER_0_0 = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
ORDER_7_3 = [2, 8, 9, 4, 0, 6, 7, 5, 1, 3]
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
