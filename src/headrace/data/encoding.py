"""Values as bytes, and back: examples in a cache, and batches that come from a reading process. Nothing is executed.

    header      JSON: the structure, and of each leaf its kind, type, shape and place
    data        the leaves, those of 64 bytes and more at multiples of 64

Numbers are leaves, too, so that values of one layout have one header: it is parsed once, and a batch of them is made by
copying rows.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.shared_memory.layout import LINE, on_lines

_SMALL = 8
"""Leaves of less than a cache line begin at a multiple of it."""
_STACKED = {"|b1", "|u1", "|i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"}
"""numpy's types that tensors have, too."""
_NUMBERS = {"i": "<i8", "f": "<f8", "o": "|b1"}
ENCODED = (
    "numbers, text, bytes, numpy's arrays of these and dense tensors in host memory (.to_dense(), .cpu()), in tuples, "
    "lists and dicts whose keys are str or int"
)
"""What has an encoding, for messages."""

Bytes = NDArray[np.uint8]
Build = Callable[[Bytes], Any]
Batch = Callable[[Sequence[Tensor]], Any]


class Unencodable(Exception):
    """Something that has no encoding; the message says what it is and where."""


class ValueEncoder:
    """Collects the leaves of a value with their places in the data, whose length is `end`."""

    def __init__(self) -> None:
        self.leaves: list[tuple[int, NDArray[np.uint8]]] = []
        self.end = 0

    def header(self, value: Any, where: str) -> bytes:
        """Returns the header of a value, whose leaves are collected.

        Raises:
            Unencodable: something in it, named from `where` on, has no encoding.
        """
        return json.dumps(self._node(value, where), separators=(",", ":")).encode()

    def _node(self, value: Any, where: str) -> list[Any]:
        kind = type(value)
        if value is None:
            return ["n"]
        if kind is tuple or kind is list:
            items = [self._node(item, f"{where}[{position}]") for position, item in enumerate(value)]
            return ["p" if kind is tuple else "l", items]
        if kind is dict:
            strange = [key for key in value if type(key) not in (str, int)]
            if strange:
                raise Unencodable(f"{where} has the key {strange[0]!r}")
            return ["d", [[key, self._node(item, f"{where}[{key!r}]")] for key, item in value.items()]]
        leaf = self._value(value) or self._array(value, where)
        if leaf is None:
            raise Unencodable(f"{where} is a {kind.__module__}.{kind.__qualname__}")
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
                raise Unencodable(f"{where} is a tensor of {value.layout} on {value.device}")
            flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            place = self._add(flat.view(torch.uint8).numpy())
            return ["t", str(value.dtype).removeprefix("torch."), list(value.shape), place]
        if type(value) is np.ndarray or type(value) is np.memmap or isinstance(value, np.generic):
            array = np.asarray(value, order="C")
            if array.dtype.kind not in "biufcmMSU" or not array.dtype.itemsize:
                raise Unencodable(f"{where} is of numpy's type {array.dtype}")
            place = self._add(array.reshape(-1).view(np.ndarray))
            return ["g" if isinstance(value, np.generic) else "a", array.dtype.str, list(array.shape), place]
        return None

    def _bytes(self, content: bytes) -> tuple[int, int]:
        return len(content), self._add(np.frombuffer(content, np.uint8))

    def _add(self, flat: NDArray[Any]) -> int:
        leaf = flat.view(np.uint8)
        place = on_lines(self.end) if len(leaf) >= LINE else -(-self.end // _SMALL) * _SMALL
        self.leaves.append((place, leaf))
        self.end = place + len(leaf)
        return place


@dataclass(frozen=True)
class Leaf:
    """The bytes of a leaf in the data; `stack`, if any, makes a tensor of leaves `(examples, bytes)`."""

    begin: int
    end: int
    stack: Callable[[Bytes], Tensor] | None


@dataclass(frozen=True)
class ValueDecoder:
    """Makes values of the data that stands under one header.

    `build` makes a value, whose arrays and tensors share the data's memory; `batch` a batch of one tensor a leaf, None
    if a leaf cannot be stacked.
    """

    header_bytes: int
    build: Build
    leaves: tuple[Leaf, ...]
    batch: Batch | None


@functools.lru_cache(maxsize=4096)
def decoder(header: bytes) -> ValueDecoder:
    """Returns what decodes the data with this header."""
    leaves: list[Leaf] = []
    build, batch = _read(json.loads(header), leaves)
    stacks = all(leaf.stack is not None for leaf in leaves)
    return ValueDecoder(len(header), build, tuple(leaves), batch if stacks else None)


def _read(node: list[Any], leaves: list[Leaf]) -> tuple[Build, Batch]:
    """Returns the functions that make a value of its data, and a batch of one tensor a leaf."""
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
        array = data[begin:end].view(dtype).reshape(shape)
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
    return Leaf(begin, end, stack), lambda data: tensor(data[begin:end], shape)


_LEAVES: Mapping[str, Callable[[str, list[Any]], tuple[Leaf, Build]]] = {
    "n": lambda kind, rest: (Leaf(0, 0, None), lambda data: None),
    **dict.fromkeys("ifo", _number),
    **dict.fromkeys("bsI", _text),
    **dict.fromkeys("ag", _array),
    "t": _tensor,
}
