"""A transform that gives another result for one (seed, epoch, index) is found and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data import InputPipeline, as_pipeline, from_arrays
from headrace.data.transforms import check_deterministic
from headrace.errors import DataError

NUMBERS = torch.arange(20.0)


def data() -> InputPipeline:
    return from_arrays(NUMBERS.clone(), NUMBERS.clone())


def noisy(example: tuple[Any, Any], rng: np.random.Generator) -> tuple[Any, Any]:
    return example[0] + rng.normal(), example[1]


def test_random_numbers_of_the_examples_own_are_the_same_twice() -> None:
    pipeline = data().shuffle().map(noisy).filter(lambda example, rng: rng.random() < 0.5)
    assert check_deterministic(pipeline, 3) == 20
    assert check_deterministic(pipeline, 3, examples=5) == 5


@pytest.mark.parametrize("value", [math.nan, "word", None, {"a": [1, math.nan]}, object(), b"x", np.array([math.nan])])
def test_whatever_an_example_is_it_is_compared(value: object) -> None:
    assert check_deterministic(data().map(lambda example: value), 0) == 20


def other_numbers() -> Callable[[Any], Any]:
    count = iter(range(1000))
    return lambda example: (example[0] + next(count), example[1])


def only_sometimes() -> Callable[[Any], Any]:
    count = iter(range(1000))
    return lambda example: next(count) % 2 == 0


def by_torch(example: tuple[Any, Any]) -> tuple[Any, Any]:
    return example[0] + torch.rand(()), example[1]


@pytest.mark.parametrize("change", [by_torch, other_numbers()])
def test_the_first_that_differs_is_named(change: Callable[[Any], Any]) -> None:
    pipeline = data().map(noisy).map(change).map(lambda example: example)
    with pytest.raises(DataError, match=r"map\((by_torch|<lambda>)\) is not deterministic: for example 0 .*rng"):
        check_deterministic(pipeline, 0)


def test_a_filter_that_thinks_twice_is_named() -> None:
    with pytest.raises(DataError, match=r"filter\(<lambda>\) is not deterministic: for example 0 "):
        check_deterministic(data().map(noisy).filter(only_sometimes()), 0)


def test_a_change_in_place_is_found() -> None:
    def doubled(example: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        example[0].mul_(2)
        return example

    with pytest.raises(DataError, match=r"map\(doubled\) changes example 1 in place"):
        # Twice nothing is nothing: example 0 does not show it.
        check_deterministic(data().map(doubled).map(noisy), 0)


def test_the_source_itself_may_be_to_blame() -> None:
    class Augmented(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return torch.rand(3)

    pipeline, _ = as_pipeline(Augmented())
    with pytest.raises(DataError, match="source is not deterministic: for example 0 "):
        check_deterministic(pipeline.map(noisy), 0)
