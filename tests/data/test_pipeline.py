"""Definitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from headrace.data import from_arrays


def test_map_finds_out_who_draws_random_numbers() -> None:
    class Augment:
        def __call__(self, example: Any, rng: Any = None) -> Any:
            return example

    def plain(example: Any) -> Any:
        return example

    pipeline = from_arrays(torch.arange(3)).map(plain).map(Augment()).map(tuple).map(lambda e, *, rng: e)
    assert [step.draws for step in pipeline.steps] == [False, True, False, True]


def test_definitions_are_frozen_and_run_nothing() -> None:
    calls: list[Any] = []
    pipeline = from_arrays(torch.arange(3)).shuffle(seed=1).map(calls.append)
    assert calls == []
    assert (pipeline.shuffled, pipeline.seed, len(pipeline)) == (True, 1, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pipeline.seed = 2  # type: ignore[misc]
