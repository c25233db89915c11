"""Which rows the next batch needs, before forward asks for them: learnt from what layers looked up in batches before.

batch   {"pairs": (1000, 2)}        the layer looked up     (1000,), the first number of each example
next    {"pairs": (1000, 2)}   ──►  it will look up         next["pairs"][:, 0]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.training.embeddings.layer import SparseEmbedding
from headrace.trees import map_leaves

_TRIES = 8
"""Steps in which a layer's indices are looked for, before they count as unknown."""
_COLUMNS = 64
_INDICES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class IndexPart:
    """A part of a leaf of the batch: the whole leaf, or of each example the same numbers.

    Attributes:
        leaf: its name, `batch['pairs']`.
        start, shape, strides: of one example's numbers in its memory; `shape` is None for the whole leaf.
    """

    leaf: str
    start: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()

    def of(self, leaf: Tensor) -> Tensor | None:
        """Returns the part of another batch; None if its examples are too short."""
        if self.shape is None:
            return leaf
        each = math.prod(leaf.shape[1:])
        last = self.start + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if leaf.dim() < 2 or last >= each:
            return None
        leaf = leaf.contiguous()
        return leaf.as_strided((len(leaf), *self.shape), (each, *self.strides), leaf.storage_offset() + self.start)


class Foresight:
    """Knows which parts of a batch the sparse embeddings of a model look up; `layers` collect their inputs from now on.

    A wrong guess costs time alone: rows that are not foreseen are pulled when forward asks for them.
    """

    def __init__(self, layers: Sequence[SparseEmbedding]) -> None:
        self._layers = layers
        self._parts: list[tuple[IndexPart, ...]] = [() for _ in layers]
        self._failed = [0] * len(layers)
        for layer in layers:
            layer.inputs = []

    def unknown(self, number: int) -> bool:
        """Returns whether a layer's indices were looked for, and are not in the batches."""
        return not self._parts[number] and self._failed[number] >= _TRIES

    def ids(self, batch: Any) -> list[Tensor]:
        """Returns for each layer the rows that it will probably look up: distinct and ascending."""
        leaves = _leaves(batch)
        return [
            torch.unique(torch.cat([*self._looked_up(number, leaves), _NONE])) for number in range(len(self._parts))
        ]

    def learn(self, batch: Any, again: Collection[int] = ()) -> None:
        """Learns from a batch whose forward is done, of layers that are not known, or `again`."""
        leaves: Mapping[str, Tensor] | None = None
        for number, layer in enumerate(self._layers):
            if (self._parts[number] and number not in again) or self._failed[number] >= _TRIES or not layer.inputs:
                continue
            leaves = _leaves(batch) if leaves is None else leaves
            self._parts[number] = _find(layer.inputs, leaves)
            self._failed[number] = 0 if self._parts[number] else self._failed[number] + 1

    def _looked_up(self, number: int, leaves: Mapping[str, Tensor]) -> Iterator[Tensor]:
        rows = self._layers[number].spec.rows
        for part in self._parts[number]:
            found = part.of(leaves[part.leaf]) if part.leaf in leaves else None
            if found is not None:
                ids = found.reshape(-1).long()
                # Wrong ones are the layer's to refuse, if it does look them up.
                yield ids[(ids >= 0) & (ids < rows)]


_NONE = torch.empty(0, dtype=torch.int64)


def _leaves(batch: Any) -> dict[str, Tensor]:
    """Returns the leaves that may have indices."""
    leaves: dict[str, Tensor] = {}

    def keep(name: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.dtype in _INDICES and leaf.dim():
            leaves[name] = leaf

    map_leaves(keep, batch)
    return leaves


def _find(calls: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> tuple[IndexPart, ...]:
    """Returns the parts that a layer has looked up in its calls; () if there are none."""
    parts = {_part(call, call.cpu(), leaves): None for call in calls}
    found = tuple(part for part in parts if part is not None)
    if not found and len(calls) > 1 and len({call.shape[1:] for call in calls}) == 1:
        # Micro-batches: together they are one call.
        together = _part(calls[0], torch.cat([call.cpu() for call in calls]), leaves)
        found = () if together is None else (together,)
    return found


def _part(call: Tensor, looked_up: Tensor, leaves: Mapping[str, Tensor]) -> IndexPart | None:
    """Returns the part with the numbers `looked_up`, which lie in memory as those of `call`."""
    for name, leaf in leaves.items():
        if leaf.numel() == looked_up.numel() and torch.equal(leaf.reshape(-1).long(), looked_up.reshape(-1).long()):
            return IndexPart(name)
        if leaf.dim() < 2 or not looked_up.dim() or len(leaf) != len(looked_up):
            continue
        for part in _candidates(name, leaf, call):
            found = part.of(leaf)
            if found is not None and found.shape == looked_up.shape and torch.equal(found.long(), looked_up.long()):
                return part
    return None


def _candidates(name: str, leaf: Tensor, call: Tensor) -> Iterator[IndexPart]:
    each = max(1, math.prod(leaf.shape[1:]))
    # A view of the leaf, or of its copy on the device.
    for offset in (call.storage_offset() - leaf.storage_offset(), call.storage_offset()):
        yield IndexPart(name, int(offset) % each, tuple(call.shape[1:]), call.stride()[1:])
    if call.dim() == 1 and each <= _COLUMNS:
        yield from (IndexPart(name, column, (), ()) for column in range(each))
