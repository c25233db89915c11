"""Checks that examples depend on (seed, epoch, index) alone: reads each twice and compares after every stage."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from headrace.data.loading.reader import ExampleReader
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.errors import DataError


def check_deterministic(pipeline: InputPipeline, seed: int, examples: int = 64) -> int:
    """Reads examples twice, evenly spread over the data, and returns how many.

    Objects whose type has no equality are taken for equal. A DataError names the example that differs, or that a
    transform changes in place, and the stage.
    """
    reader = ExampleReader(pipeline, seed)
    places = range(0, len(pipeline), max(1, len(pipeline) // examples))[:examples]
    for place in places:
        before = _source(reader, place)
        if not _same(before, _source(reader, place)):
            raise _differs(reader, place, reader.stages[0])
        first = []
        for stage, value in reader.trace(0, place):
            first.append(copy.deepcopy(value))
            if not _same(before, _source(reader, place)):
                raise DataError(
                    f"{stage} changes {reader.key(place)} in place, so that the next epoch begins with what this one "
                    "has made of it; let it return something new, or copy first"
                )
        second = [value for _, value in reader.trace(0, place)]
        for number, (one, other) in enumerate(zip(first, second, strict=False)):
            if not _same(one, other):
                raise _differs(reader, place, reader.stages[number])
        if len(first) != len(second):
            raise _differs(reader, place, reader.stages[min(len(first), len(second))])
    return len(places)


def _source(reader: ExampleReader, place: int) -> Any:
    """Returns a copy of an example as the source has it."""
    return copy.deepcopy(next(reader.trace(0, place), None))


def _differs(reader: ExampleReader, place: int, stage: str) -> DataError:
    return DataError(
        f"{stage} is not deterministic: for {reader.key(place)} it gave two results for one seed, epoch and index; "
        "let it draw random numbers from its parameter rng alone, and depend on nothing that changes between two calls"
    )


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        # NaN is not equal to itself.
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    equality: object = type(one).__eq__
    if equality is object.__eq__:
        return True
    return bool(one == other or (one != one and other != other))
