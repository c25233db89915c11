from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace import metrics
from headrace.errors import DataError, UsageError
from headrace.metrics import Mean, align, weigh

Metric = Callable[[Tensor, Tensor], Tensor]

# (output, target) -> what it must be, computed by hand
BY_HAND: list[tuple[Metric, object, object, float]] = [
    (metrics.squared_error, [1.0, 2.0], [0.0, 4.0], 2.5),
    (metrics.absolute_error, [1.0, 2.0], [0.0, 4.0], 1.5),
    (metrics.squared_error, [[1.0], [2.0]], [0, 4], 2.5),
    (metrics.binary_cross_entropy, [0.0, 2.0], [1, 0], (math.log(2) + math.log1p(math.exp(2))) / 2),
    (metrics.binary_cross_entropy, [0.0, 2.0], [1.0, -1.0], (math.log(2) + math.log1p(math.exp(2))) / 2),
    (metrics.binary_cross_entropy, [0.0], [0.25], math.log(2)),
    (metrics.hinge, [0.5, 0.5, -3.0], [1, 0, 0], (0.5 + 1.5 + 0.0) / 3),
    (metrics.hinge, [0.5, 0.5, -3.0], [1, -1, -1], (0.5 + 1.5 + 0.0) / 3),
    (metrics.squared_hinge, [0.5, 0.5, -3.0], [True, False, False], (0.25 + 2.25 + 0.0) / 3),
    (metrics.cross_entropy, [[0.0, 0.0], [0.0, math.log(3)]], [0, 1], (math.log(2) + math.log(4 / 3)) / 2),
    (metrics.cross_entropy, [[0.0, 0.0]], [[0.25, 0.75]], math.log(2)),
    (metrics.accuracy, [[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]], [1, 1, 1], 2 / 3),
    (metrics.accuracy, [[1.0, 2.0], [3.0, 0.0]], [[0.1, 0.9], [0.2, 0.8]], 1 / 2),
    (partial(metrics.top_k_accuracy, k=2), [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], [1, 2], 1 / 2),
    (partial(metrics.top_k_accuracy, k=2), [[3.0, 2.0, 1.0]], [[0.0, 1.0, 0.0]], 1.0),
    (metrics.binary_accuracy, [[0.5], [-0.5], [0.5]], [1, 1, 0], 1 / 3),
    (metrics.binary_accuracy, [0.5, -0.5], [1, -1], 1.0),
    (metrics.exact_match, [[1.0, 1.0], [1.0, -1.0]], [[1, 1], [1, 1]], 1 / 2),
]


@pytest.mark.parametrize(("metric", "output", "target", "expected"), BY_HAND)
def test_by_hand(metric: Metric, output: object, target: object, expected: float) -> None:
    value = metric(torch.tensor(output), torch.tensor(target))
    assert value.shape == ()
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_dense_prediction_counts_positions() -> None:
    output = torch.zeros(2, 3, 4)
    output[:, 1] = 1.0
    target = torch.ones(2, 4, dtype=torch.int64)
    target[0, 0] = 2
    assert metrics.accuracy(output, target).item() == 7 / 8
    assert metrics.top_k_accuracy(output, target, k=3).item() == 1.0
    rows = torch.nn.functional.one_hot(target, 3).movedim(-1, 1).double()
    assert metrics.accuracy(output, rows).item() == 7 / 8
    torch.testing.assert_close(metrics.cross_entropy(output, target), metrics.cross_entropy(output, rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64])
def test_class_indices_of_any_integer_type(dtype: torch.dtype) -> None:
    output, target = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])
    assert metrics.cross_entropy(output, target.to(dtype)) == metrics.cross_entropy(output, target)
    assert metrics.accuracy(output, target.to(dtype)) == metrics.accuracy(output, target)


def test_no_class_index_is_skipped_silently() -> None:
    with pytest.raises(IndexError, match="-100"):
        metrics.cross_entropy(torch.zeros(2, 3), torch.tensor([1, -100]))


@pytest.mark.parametrize(
    ("output", "target"),
    [((4, 1), (4, 2)), ((4,), (3,)), ((4, 2), (4,)), ((4, 1, 1), (4,)), ((1, 4), (4,)), ((4, 1), (1, 4))],
)
@pytest.mark.parametrize("metric", [metrics.squared_error, metrics.binary_cross_entropy, metrics.binary_accuracy])
def test_shapes_are_never_broadcast(metric: Metric, output: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(DataError) as caught:
        metric(torch.zeros(output), torch.zeros(target))
    assert str(output) in str(caught.value)
    assert str(target) in str(caught.value)


def test_a_last_dim_of_one_is_dropped_on_either_side_whatever_the_batch() -> None:
    for batch in (0, 1, 5):
        for output, target in [((batch, 1), (batch,)), ((batch,), (batch, 1)), ((batch, 3, 1), (batch, 3))]:
            left, right = align(torch.zeros(output), torch.zeros(target, dtype=torch.int64))
            assert left.shape == right.shape == min(output, target, key=len)
            assert left.dtype == right.dtype == torch.float32


def test_an_accuracy_refuses_targets_of_another_shape() -> None:
    with pytest.raises(DataError, match=r"target \(4, 1\)"):
        metrics.accuracy(torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64))
    with pytest.raises(DataError, match=r"target \(4, 3\)"):
        metrics.top_k_accuracy(torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.int64), k=1)


ALIKE: list[Metric] = [
    *(metrics.squared_error, metrics.absolute_error, metrics.binary_cross_entropy, metrics.hinge),
    *(metrics.squared_hinge, metrics.binary_accuracy, metrics.exact_match),
]
OVER_CLASSES: list[Metric] = [metrics.cross_entropy, metrics.accuracy, partial(metrics.top_k_accuracy, k=2)]


@pytest.mark.parametrize("metric", [*ALIKE, *OVER_CLASSES])
@given(seed=st.integers(0, 999), sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any))
def test_parts_weigh_together_to_the_whole(metric: Metric, seed: int, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    if metric in OVER_CLASSES:
        target = torch.randint(0, 4, (len(output),), generator=generator)
    else:
        target = torch.randint(0, 2, output.shape, generator=generator)
    parts = [weigh(metric(*pair), len(pair[0])) for pair in zip(output.split(sizes), target.split(sizes), strict=True)]
    total = sum(float(total) for total, _ in parts)
    weight = sum(float(weight) for _, weight in parts)
    assert total / weight == pytest.approx(metric(output, target).item(), rel=1e-12)


def test_an_accuracy_times_its_examples_is_the_count_again() -> None:
    output = torch.tensor([[0.0, 1.0]]).repeat(49_999, 1)
    target = torch.zeros(49_999, dtype=torch.int64)
    target[:33_331] = 1
    total, _ = weigh(metrics.accuracy(output, target), 49_999)
    assert total.item() == pytest.approx(33_331, abs=1e-9)


def test_weigh_takes_a_scalar_as_a_mean_over_examples() -> None:
    value = torch.tensor(0.5, requires_grad=True)
    total, weight = weigh(value, 8)
    assert (total.item(), weight) == (4.0, 8.0)
    total.backward()
    assert value.grad is not None
    assert value.grad.item() == 8.0


def test_weigh_leaves_a_mean_its_own_weight() -> None:
    total, weight = torch.tensor(6.0), torch.tensor(12)
    assert weigh(Mean(total, weight), 3) == (total, weight)
    assert weigh(Mean(total, 12.0), 3) == (total, 12.0)


def test_a_mean_of_no_examples_weighs_nothing() -> None:
    total, weight = weigh(metrics.squared_error(torch.zeros(0), torch.zeros(0)), 0)
    assert (total.item(), weight) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(32), r"the loss .*\(32,\).*\.mean\(\)"),
        (torch.zeros(1), r"the loss .*\(1,\).*\.mean\(\)"),
        (Mean(torch.zeros(32), 32.0), r"total of the loss .*\(32,\).*\.sum\(\)"),
        (Mean(torch.zeros(()), torch.ones(32)), r"weight of the loss .*\(32,\).*\.sum\(\)"),
        (0.5, r"the loss must be a scalar tensor or an hr\.Mean, got float \(0\.5\)"),
        (None, "got NoneType"),
        ({"loss": torch.zeros(())}, "got dict"),
    ],
)
def test_what_is_no_scalar_is_refused(value: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        weigh(value, 32)


def test_the_message_names_who_returned_it() -> None:
    with pytest.raises(UsageError, match="the metric 'recall' is no scalar"):
        weigh(torch.zeros(2), 2, "the metric 'recall'")
