"""The record of an example in a cache.

8 bytes         checksum of all that follows
32 bytes        magic, length of the header, of the record, index, generation, kind
header, data    of the example, see `encoding`; the data begins at a multiple of 64
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.encoding import ENCODED, Unencodable, ValueDecoder, ValueEncoder
from headrace.data.pipeline.steps import Absent
from headrace.errors import DataError
from headrace.shared_memory.layout import LINE, on_lines

_FRONT = struct.Struct("<Q4sIQQII")
FRONT_BYTES = _FRONT.size
_MAGIC = b"HRex"
_WEIGHTS = np.random.Philox(key=0x48526578).random_raw(1 << 13) | np.uint64(1)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Front:
    """The fixed front of a record; `generation` counts the damaged records of its example that it replaces."""

    header_bytes: int
    record_bytes: int
    index: int
    generation: int
    left_out: bool

    def header(self, record: NDArray[np.uint8]) -> bytes:
        """Returns the header of the record with this front."""
        return record[FRONT_BYTES : FRONT_BYTES + self.header_bytes].tobytes()


def pack(index: int, value: Any, generation: int = 0) -> NDArray[np.uint8]:
    """Returns the record of an example, or of `Absent.LEFT_OUT`; a DataError for a type that cannot be cached."""
    encoder = ValueEncoder()
    left_out = value is Absent.LEFT_OUT
    try:
        header = encoder.header(None if left_out else value, f"example {index}")
    except Unencodable as error:
        raise DataError(
            f"{error}, which a cache cannot keep: it keeps {ENCODED}; convert it in a map before the cache"
        ) from None
    data = on_lines(FRONT_BYTES + len(header))
    record = np.zeros(on_lines(data + encoder.end), dtype=np.uint8)
    _FRONT.pack_into(record.data, 0, 0, _MAGIC, len(header), len(record), index, generation, left_out)
    record[FRONT_BYTES : FRONT_BYTES + len(header)] = np.frombuffer(header, np.uint8)
    for place, leaf in encoder.leaves:
        record[data + place : data + place + len(leaf)] = leaf
    record[:8].view("<u8")[0] = _checksum(record)
    return record


def front_at(buffer: NDArray[np.uint8], begin: int) -> Front | None:
    """Returns the front of the record at `begin`, which may extend beyond the buffer; None if there is no record."""
    if begin + FRONT_BYTES > len(buffer):
        return None
    _, magic, header, length, index, generation, kind = _FRONT.unpack_from(buffer.data, begin)
    if magic != _MAGIC or length % LINE or FRONT_BYTES + header > length:
        return None
    return Front(header, length, index, generation, bool(kind))


def front_of(record: NDArray[np.uint8]) -> Front:
    """Returns the front of a whole record."""
    front = front_at(record, 0)
    assert front is not None
    return front


def is_sound(record: NDArray[np.uint8]) -> bool:
    """Returns whether the checksum of a record is right."""
    return int(record[:8].view("<u8")[0]) == _checksum(record)


def _checksum(record: NDArray[np.uint8]) -> int:
    """A multilinear hash of 64-bit words (Carter, Wegman, "Universal classes of hash functions", 1979).

    The weights are odd, so that any change of a single word changes it. It is six times as fast as zlib.crc32.
    """
    words = record.view("<u8")[1:]
    total = len(words)
    for start in range(0, len(words), len(_WEIGHTS)):
        piece = words[start : start + len(_WEIGHTS)]
        total = (total * 0x9E3779B97F4A7C15 + int(np.dot(piece, _WEIGHTS[: len(piece)]))) & _MASK
    return total


def data_of(layout: ValueDecoder) -> int:
    """Returns where the data begins in records with a header."""
    return on_lines(FRONT_BYTES + layout.header_bytes)


def gathered(layout: ValueDecoder, records: Sequence[NDArray[np.uint8]]) -> Any:
    """Returns the batch of records of one layout with `batch`, as `collate` would make it, copying each row once."""
    assert layout.batch is not None
    data, tensors = data_of(layout), []
    for leaf in layout.leaves:
        rows = np.empty((len(records), leaf.end - leaf.begin), dtype=np.uint8)
        begin, end = data + leaf.begin, data + leaf.end
        for row, record in zip(rows, records, strict=True):
            row[:] = record[begin:end]
        assert leaf.stack is not None
        tensors.append(leaf.stack(rows))
    return layout.batch(tensors)
