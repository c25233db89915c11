"""Strings as indices of an embedding, by a hash that is the same on every machine and in every run."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError, UsageError

_DIGEST_BYTES = 8


def string_ids(strings: Any, rows: int) -> Tensor:
    """Returns an index from 1 to `rows - 1` for each string, by a 64-bit hash (BLAKE2b); 0 is left for padding.

    Two of n different strings share an index with a probability of about n * n / (2 * rows): of a million strings,
    with `rows=2**56`, of 1 in 140,000.

    Args:
        strings: a str or bytes, or an array or nested lists of them; text is hashed as UTF-8.
        rows: the `num_embeddings` of the layer, at least 2.

    Returns:
        int64, in the shape of `strings`; a scalar tensor for one string.

    Raises:
        DataError: something in it is no string.
        UsageError: there are too few rows.

    Examples:
        >>> ids = hr.data.string_ids(["cat", "dog", "cat"], rows=1000)
        >>> bool(ids[0] == ids[2]), bool(ids[0] == ids[1])
        (True, False)
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or not 2 <= rows < 1 << 63:
        raise UsageError(f"rows must be a whole number from 2 to 2**63 - 1, got {rows!r}")
    # As objects, because numpy's own strings lose zeros at their end.
    array = np.array(strings, dtype=object)
    ids = np.fromiter((1 + _hash(each) % (rows - 1) for each in array.flat), dtype=np.int64, count=array.size)
    return torch.from_numpy(ids).view(array.shape)


def _hash(value: Any) -> int:
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    elif not isinstance(value, bytes):
        raise DataError(
            f"string_ids is for str and bytes, in lists of equal length, and got {type(value).__name__} {value!r:.60}; "
            "convert it (str(value)), or pad the lists"
        )
    return int.from_bytes(hashlib.blake2b(value, digest_size=_DIGEST_BYTES).digest(), "little")
