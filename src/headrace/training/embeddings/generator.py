"""The first values of rows, each from the seed, the table's name and the row's index alone.

So any process can make any row at any time, and all make the same one. The generator is Philox4x32-10: Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3" (2011), section 3.3.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.spec.embedding import RowInit, TableSpec

_Words = NDArray[np.uint64]

_ROUNDS = 10
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_WORDS = 4
"""32-bit words of one block."""


def philox(counters: tuple[_Words, _Words, _Words, _Words], key: tuple[int, int]) -> tuple[_Words, ...]:
    """Returns four words of 32 bits for each counter of four words; all are arrays of uint64, of one shape."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(_ROUNDS):
        one, other = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c1 = (other >> _HALF) ^ c1 ^ np.uint64(k0), other & _LOW
        c2, c3 = (one >> _HALF) ^ c3 ^ np.uint64(k1), one & _LOW
        k0, k1 = (k0 + _STEPS[0]) & 0xFFFFFFFF, (k1 + _STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def first_rows(table: TableSpec, ids: Tensor) -> Tensor:
    """Returns how these rows of a table begin, `(ids, width)`; `ids` are int64."""
    values = torch.from_numpy(_values(table, ids.numpy())).to(getattr(torch, table.dtype))
    if table.padding >= 0:
        values[ids == table.padding] = 0
    return values


def _values(table: TableSpec, ids: NDArray[np.int64]) -> NDArray[Any]:
    init, shape = table.init, (len(ids), table.width)
    if init.kind == "constant":
        return np.full(shape, init.first)
    blocks = -(-table.width // _WORDS)
    rows = ids.astype(np.uint64)
    block = np.broadcast_to(np.arange(blocks, dtype=np.uint64), (len(ids), blocks))
    low = np.broadcast_to((rows & _LOW)[:, None], block.shape)
    high = np.broadcast_to((rows >> _HALF)[:, None], block.shape)
    digest = hashlib.blake2b(f"{table.seed}/{table.name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    words = philox((block, np.zeros_like(block), low, high), key)
    # In the middle of 2**32 equal intervals, so that neither 0 nor 1 comes.
    units = [(word.astype(np.float64) + 0.5) * 2.0**-32 for word in words]
    return (_scaled(init, units)).reshape(len(ids), blocks * _WORDS)[:, : table.width]


def _scaled(init: RowInit, units: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    if init.kind == "uniform":
        return init.first + (init.second - init.first) * np.stack(units, -1)
    if init.kind == "truncated":
        # By the inverse of the distribution, between its values at the bounds.
        low, high = (math.erf((bound - init.first) / init.second / math.sqrt(2)) for bound in init.bounds)
        drawn = torch.erfinv(torch.from_numpy(low + (high - low) * np.stack(units, -1))).numpy()
        return np.clip(init.first + init.second * math.sqrt(2) * drawn, *init.bounds)
    # Box and Muller, "A note on the generation of random normal deviates" (1958).
    found = []
    for one, other in (units[:2], units[2:]):
        radius, angle = np.sqrt(-2 * np.log(one)), 2 * np.pi * other
        found += [radius * np.cos(angle), radius * np.sin(angle)]
    return init.first + init.second * np.stack(found, -1)
