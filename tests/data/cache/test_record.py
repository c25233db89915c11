"""Examples as bytes: whatever is kept comes back, and no bit of it changes unseen."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays

from headrace.data.cache.record import data_of, front_at, front_of, gathered, is_sound, pack
from headrace.data.encoding import decoder
from headrace.data.pipeline.source import collate
from headrace.data.pipeline.steps import Absent
from headrace.errors import DataError

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)


class Named(NamedTuple):
    label: int


def unpacked(record: np.ndarray[Any, Any]) -> Any:
    form = decoder(front_of(record).header(record))
    return form.build(record[data_of(form) :])


@some.composite
def tensors(draw: some.DrawFn) -> torch.Tensor:
    shape = draw(some.lists(some.integers(0, 4), max_size=3))
    count = int(np.prod(shape, dtype=int))
    values = draw(some.lists(some.integers(0, 1), min_size=count, max_size=count))
    return torch.tensor(values).reshape(shape).to(draw(some.sampled_from(DTYPES)))


NUMBERS = some.one_of(
    arrays.boolean_dtypes(), arrays.integer_dtypes(), arrays.floating_dtypes(), arrays.complex_number_dtypes()
)
LEAVES = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.text(some.characters(exclude_categories=[]))
    | some.binary()
    | tensors()
    | arrays.arrays(NUMBERS, arrays.array_shapes(min_dims=0, min_side=0))
    | arrays.arrays(arrays.datetime64_dtypes() | arrays.unicode_string_dtypes(min_len=1), 3)
    | arrays.from_dtype(np.dtype(np.float32))
)
EXAMPLES = some.recursive(
    LEAVES,
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.lists(inner, max_size=4).map(tuple)
        | some.dictionaries(some.text(max_size=3) | some.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Returns whether two examples are of the same types, and the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(((one == other) | (one != one)).all())
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or one != one


@pytest.mark.slow
@settings(deadline=None)
@given(EXAMPLES, some.integers(0, 2**63 - 1), some.integers(0, 2**32 - 1))
def test_what_is_kept_comes_back(example: Any, index: int, generation: int) -> None:
    record = pack(index, example, generation)
    front = front_of(record)
    assert is_sound(record)
    assert (front.index, front.generation, front.left_out) == (index, generation, False)
    assert front.record_bytes == len(record)
    assert len(record) % 64 == 0
    assert same(unpacked(record), example)


def test_one_that_is_left_out_is_kept_as_such() -> None:
    record = pack(7, Absent.LEFT_OUT)
    assert is_sound(record)
    assert front_of(record).left_out
    assert not front_of(pack(7, None)).left_out


@given(some.integers(0), some.integers(0, 200))
def test_a_flipped_bit_is_found(bit: int, length: int) -> None:
    record = pack(3, (torch.arange(length), "text", 5))
    place = bit % (8 * len(record))
    record[place // 8] ^= 1 << (place % 8)
    assert not is_sound(record)


@pytest.mark.parametrize("changed", [slice(None), slice(0, 64), slice(64, 128), slice(1 << 18, None)])
def test_zeros_are_no_record(changed: slice) -> None:
    record = pack(3, torch.randint(1, 200, (1 << 19,), dtype=torch.uint8))
    record[changed] = 0
    assert front_at(record, 0) is None or not is_sound(record)


def test_pieces_that_changed_places_are_found() -> None:
    record = pack(3, torch.randint(1, 200, (1 << 19,), dtype=torch.uint8))
    first, second = record[1024:2048].copy(), record[1 << 18 : (1 << 18) + 1024].copy()
    record[1024:2048], record[1 << 18 : (1 << 18) + 1024] = second, first
    assert not is_sound(record)


FIXED = some.fixed_dictionaries(
    {
        "image": arrays.arrays(np.uint8, (3, 4)),
        "label": some.integers(-(2**63), 2**63 - 1),
        "weight": some.floats(),
        "sure": some.booleans(),
        "inner": some.tuples(arrays.arrays(np.float32, ()), some.lists(some.just(1), min_size=2, max_size=2)),
    }
).map(lambda example: dict(sorted(example.items())))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(some.lists(FIXED, min_size=1, max_size=4), some.booleans())
def test_a_batch_is_what_collating_makes_of_the_examples(examples: list[Any], tuples: bool) -> None:
    given = [(example["image"], example) for example in examples] if tuples else examples
    records = [pack(index, example) for index, example in enumerate(given)]
    headers = {front_of(record).header(record) for record in records}
    assert len(headers) == 1
    assert same(gathered(decoder(headers.pop()), records), collate(given))


@pytest.mark.slow
@given(some.lists(tensors(), min_size=1, max_size=1), some.integers(1, 3))
def test_tensors_of_every_type_make_a_batch(chosen: list[torch.Tensor], count: int) -> None:
    records = [pack(index, chosen[0]) for index in range(count)]
    header = front_of(records[0]).header(records[0])
    assert same(gathered(decoder(header), records), torch.stack(chosen * count))


@pytest.mark.parametrize("example", ["text", b"bytes", None, (1, "text"), np.float32(1), 2**70, np.array(["text"])])
def test_what_is_not_stacked_makes_no_batch(example: Any) -> None:
    record = pack(0, example)
    assert decoder(front_of(record).header(record)).batch is None


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ((1, {"image": object()}), r"example 5\[1\]\['image'\] is a builtins.object"),
        (OrderedDict(a=1), "OrderedDict"),
        (Named(3), "Named"),
        (np.array([object()]), "numpy's type object"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({2.5: 1}, "the key 2.5"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
    ],
)
def test_what_cannot_come_back_is_refused(example: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        pack(5, example)
