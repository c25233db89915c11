"""Strings as indices: the same everywhere, none of them the padding's."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.errors import DataError, UsageError


def test_the_index_of_a_string_is_what_it_was_when_a_model_was_trained_with_it() -> None:
    rows = 1 << 40
    ids = hr.data.string_ids([["weir", "wéir"], [b"weir", ""]], rows)
    assert ids.shape == (2, 2)
    # These must not change: tables that were saved would have other rows.
    assert ids.tolist() == [[82971222477, 1066862334477], [82971222477, 499698194782]]
    whole = int.from_bytes(hashlib.blake2b(b"weir", digest_size=8).digest(), "little")
    assert ids[0, 0] == 1 + whole % (rows - 1)


def test_arrays_and_single_strings_have_their_shape() -> None:
    words = np.array(["a", "b", "a"])
    ids = hr.data.string_ids(words, 1 << 56)
    assert ids.dtype == torch.int64
    assert ids[0] == ids[2] != ids[1]
    assert hr.data.string_ids("a", 1 << 56).shape == ()
    assert hr.data.string_ids("a", 1 << 56) == ids[0]
    assert hr.data.string_ids([], 5).shape == (0,)


def test_indices_are_within_the_table_and_leave_out_the_padding() -> None:
    ids = hr.data.string_ids([str(number) for number in range(2_000)], 7)
    assert sorted(set(ids.tolist())) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("strings", [[1, 2], [["a"], ["b", "c"]], [None]])
def test_what_is_no_string_is_refused(strings: list[object]) -> None:
    with pytest.raises(DataError, match=r"string_ids is for str and bytes, .* got (int 1|list|NoneType)"):
        hr.data.string_ids(strings, 100)


@pytest.mark.parametrize("rows", [1, 1 << 63, 2.5])
def test_rows_out_of_range_are_refused(rows: int) -> None:
    with pytest.raises(UsageError, match="rows must be a whole number from 2"):
        hr.data.string_ids("a", rows)
