"""The record of an example in a cache: its encoding as bytes, and back. No part of it is executed.

    8 bytes     checksum of all that follows
    32 bytes    magic, length of the header, of the record, index, generation, kind
    header      JSON: the structure, and of each leaf its kind, type, shape and place
    data        the leaves, those of 64 bytes and more at multiples of 64

Numbers are leaves, too, so that examples of one layout have one header: it is parsed once, and their batch is made by
copying rows.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.pipeline.steps import Absent
from headrace.errors import DataError

_ALIGNMENT = 64
"""Every record, and every leaf of at least that size, begins at a multiple of it."""
_SMALL = 8
_FRONT = struct.Struct("<Q4sIQQII")
FRONT_BYTES = _FRONT.size
_MAGIC = b"HRex"
_WEIGHTS = np.random.Philox(key=0x48526578).random_raw(1 << 13) | np.uint64(1)
_MASK = (1 << 64) - 1
_STACKED = {"|b1", "|u1", "|i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"}
"""numpy's types that tensors have, too."""
_NUMBERS = {"i": "<i8", "f": "<f8", "o": "|b1"}
_KEPT = "numbers, text, bytes, arrays and tensors, in tuples, lists and dicts"


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
    packing = _Packing()
    left_out = value is Absent.LEFT_OUT
    structure = ["n"] if left_out else packing.node(value, f"example {index}")
    header = json.dumps(structure, separators=(",", ":")).encode()
    data = _aligned(FRONT_BYTES + len(header))
    record = np.zeros(_aligned(data + packing.end), dtype=np.uint8)
    _FRONT.pack_into(record.data, 0, 0, _MAGIC, len(header), len(record), index, generation, left_out)
    record[FRONT_BYTES : FRONT_BYTES + len(header)] = np.frombuffer(header, np.uint8)
    for place, leaf in packing.leaves:
        record[data + place : data + place + len(leaf)] = leaf
    record[:8].view("<u8")[0] = _checksum(record)
    return record


def front_at(buffer: NDArray[np.uint8], begin: int) -> Front | None:
    """Returns the front of the record at `begin`, which may extend beyond the buffer; None if there is no record."""
    if begin + FRONT_BYTES > len(buffer):
        return None
    _, magic, header, length, index, generation, kind = _FRONT.unpack_from(buffer.data, begin)
    if magic != _MAGIC or length % _ALIGNMENT or FRONT_BYTES + header > length:
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


class _Packing:
    """Collects the leaves of an example with their places in the data, whose length is `end`."""

    def __init__(self) -> None:
        self.leaves: list[tuple[int, NDArray[np.uint8]]] = []
        self.end = 0

    def node(self, value: Any, where: str) -> list[Any]:
        kind = type(value)
        if value is None:
            return ["n"]
        if kind is tuple or kind is list:
            items = [self.node(item, f"{where}[{position}]") for position, item in enumerate(value)]
            return ["p" if kind is tuple else "l", items]
        if kind is dict:
            strange = [key for key in value if type(key) not in (str, int)]
            if strange:
                raise DataError(f"{where} has the key {strange[0]!r}; a cache keeps dicts whose keys are str or int")
            return ["d", [[key, self.node(item, f"{where}[{key!r}]")] for key, item in value.items()]]
        leaf = self._value(value) or self._array(value, where)
        if leaf is None:
            raise DataError(
                f"{where} is a {kind.__module__}.{kind.__qualname__}, which a cache cannot keep: it keeps {_KEPT}; "
                "convert it in a map before the cache"
            )
        return leaf

    def _value(self, value: Any) -> list[Any] | None:
        """Returns the node of a number, text or bytes."""
        kind = type(value)
        if kind is bool or kind is float or (kind is int and -(1 << 63) <= value < 1 << 63):
            letter = {bool: "o", float: "f", int: "i"}[kind]
            return [letter, self._add(np.array([value], dtype=_NUMBERS[letter]))]
        if kind is int:
            return ["I", *self._bytes(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))]
        if kind is bytes:
            return ["b", *self._bytes(value)]
        return ["s", *self._bytes(value.encode("utf-8", "surrogatepass"))] if kind is str else None

    def _array(self, value: Any, where: str) -> list[Any] | None:
        if type(value) is Tensor:
            if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
                raise DataError(f"{where} is a tensor of {value.layout} on {value.device}; a cache keeps dense ones in "
                                "host memory: .to_dense(), .cpu()")  # fmt: skip
            flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            place = self._add(flat.view(torch.uint8).numpy())
            return ["t", str(value.dtype).removeprefix("torch."), list(value.shape), place]
        if type(value) is np.ndarray or type(value) is np.memmap or isinstance(value, np.generic):
            array = np.asarray(value, order="C")
            if array.dtype.kind not in "biufcmMSU" or not array.dtype.itemsize:
                raise DataError(f"{where} is of numpy's type {array.dtype}, which a cache cannot keep; encode it as "
                                "numbers in a map before the cache")  # fmt: skip
            place = self._add(array.reshape(-1).view(np.ndarray))
            return ["g" if isinstance(value, np.generic) else "a", array.dtype.str, list(array.shape), place]
        return None

    def _bytes(self, content: bytes) -> tuple[int, int]:
        return len(content), self._add(np.frombuffer(content, np.uint8))

    def _add(self, flat: NDArray[Any]) -> int:
        leaf = flat.view(np.uint8)
        place = _aligned(self.end, _ALIGNMENT if len(leaf) >= _ALIGNMENT else _SMALL)
        self.leaves.append((place, leaf))
        self.end = place + len(leaf)
        return place


Bytes = NDArray[np.uint8]
Build = Callable[[Bytes], Any]
Batch = Callable[[Sequence[Tensor]], Any]


@dataclass(frozen=True)
class Leaf:
    """The bytes of a leaf in a record's data; `stack`, if any, makes a tensor of leaves `(examples, bytes)`."""

    begin: int
    end: int
    stack: Callable[[Bytes], Tensor] | None


@dataclass(frozen=True)
class RecordLayout:
    """The layout of records with one header.

    `data` is where the leaves begin, `build` makes an example of a record's data without sharing its memory, `batch` a
    batch of one tensor a leaf; it is None if a leaf cannot be stacked.
    """

    data: int
    build: Build
    leaves: tuple[Leaf, ...]
    batch: Batch | None


@functools.lru_cache(maxsize=4096)
def layout_of(header: bytes) -> RecordLayout:
    """Returns the layout that a header describes."""
    leaves: list[Leaf] = []
    build, batch = _read(json.loads(header), leaves)
    simple = all(leaf.stack is not None for leaf in leaves)
    return RecordLayout(_aligned(FRONT_BYTES + len(header)), build, tuple(leaves), batch if simple else None)


def gathered(layout: RecordLayout, records: Sequence[Bytes]) -> Any:
    """Returns the batch of records of one layout with `batch`, as `collate` would make it, copying each row once."""
    assert layout.batch is not None
    tensors = []
    for leaf in layout.leaves:
        rows = np.empty((len(records), leaf.end - leaf.begin), dtype=np.uint8)
        begin, end = layout.data + leaf.begin, layout.data + leaf.end
        for row, record in zip(rows, records, strict=True):
            row[:] = record[begin:end]
        assert leaf.stack is not None
        tensors.append(leaf.stack(rows))
    return layout.batch(tensors)


def _read(node: list[Any], leaves: list[Leaf]) -> tuple[Build, Batch]:
    """Returns the functions that make an example of a record's data, and a batch of one tensor a leaf."""
    kind, *rest = node
    if kind in ("p", "l"):
        read = [_read(item, leaves) for item in rest[0]]
        builds, batches = [build for build, _ in read], [batch for _, batch in read]
        make: type = tuple if kind == "p" else list
        return (
            lambda data: make(build(data) for build in builds),
            lambda tensors: make(batch(tensors) for batch in batches),
        )
    if kind == "d":
        named = {key: _read(item, leaves) for key, item in rest[0]}
        return (
            lambda data: {key: build(data) for key, (build, _) in named.items()},
            lambda tensors: {key: batch(tensors) for key, (_, batch) in named.items()},
        )
    number = len(leaves)
    leaf, build = _LEAVES[kind](kind, rest)
    leaves.append(leaf)
    return build, lambda tensors: tensors[number]


def _nothing(kind: str, rest: list[Any]) -> tuple[Leaf, Build]:
    return Leaf(0, 0, None), lambda data: None


def _number(kind: str, rest: list[Any]) -> tuple[Leaf, Build]:
    dtype, (begin,) = np.dtype(_NUMBERS[kind]), rest
    end = begin + dtype.itemsize
    stack = lambda rows: torch.from_numpy(rows.reshape(-1).view(dtype))  # noqa: E731
    return Leaf(begin, end, stack), lambda data: data[begin:end].view(dtype)[0].item()


def _text(kind: str, rest: list[Any]) -> tuple[Leaf, Build]:
    length, begin = rest
    makes: Mapping[str, Callable[[bytes], Any]] = {
        "b": lambda content: content,
        "s": lambda content: content.decode("utf-8", "surrogatepass"),
        "I": lambda content: int.from_bytes(content, "little", signed=True),
    }
    make, end = makes[kind], begin + length
    return Leaf(begin, end, None), lambda data: make(data[begin:end].tobytes())


def _array(kind: str, rest: list[Any]) -> tuple[Leaf, Build]:
    dtype, shape, begin = np.dtype(rest[0]), tuple(rest[1]), rest[2]
    end = begin + math.prod(shape) * dtype.itemsize

    def build(data: Bytes) -> Any:
        array = data[begin:end].copy().view(dtype).reshape(shape)
        return array[()] if kind == "g" else array

    def stack(rows: Bytes) -> Tensor:
        return torch.from_numpy(rows.reshape(-1).view(dtype).reshape(len(rows), *shape))

    return Leaf(begin, end, stack if kind == "a" and dtype.str in _STACKED else None), build


def _tensor(kind: str, rest: list[Any]) -> tuple[Leaf, Build]:
    dtype, shape, begin = getattr(torch, rest[0]), tuple(rest[1]), rest[2]
    end = begin + math.prod(shape) * dtype.itemsize

    def tensor(flat: Bytes, shape: tuple[int, ...]) -> Tensor:
        # The strides of an empty tensor cannot be viewed.
        return torch.from_numpy(flat).view(dtype).reshape(shape) if len(flat) else torch.empty(shape, dtype=dtype)

    stack = lambda rows: tensor(rows.reshape(-1), (len(rows), *shape))  # noqa: E731
    return Leaf(begin, end, stack), lambda data: tensor(data[begin:end].copy(), shape)


_LEAVES: Mapping[str, Callable[[str, list[Any]], tuple[Leaf, Build]]] = {
    "n": _nothing,
    **dict.fromkeys("ifo", _number),
    **dict.fromkeys("bsI", _text),
    **dict.fromkeys("ag", _array),
    "t": _tensor,
}


def _aligned(place: int, alignment: int = _ALIGNMENT) -> int:
    return -(-place // alignment) * alignment
