"""Batches that were read once, again and again: data that costs nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch, Source
from headrace.data.pipeline.steps import Reading
from headrace.errors import DataError
from headrace.trees import map_leaves, map_tensors


def replayed(batches: Sequence[Any]) -> tuple[InputPipeline, int]:
    """Returns a pipeline over the examples of some batches, in their order, and of how many each of its batches is.

    Batches whose shapes differ from the first one's beyond their first dim are left out; longer ones are cut.

    Args:
        batches: trees of tensors `(examples, ...)`.

    Raises:
        DataError: there is no batch with an example.
    """
    alike: list[dict[str, Tensor]] = []
    for batch in batches:
        leaves: dict[str, Tensor] = {}
        map_leaves(lambda name, leaf: leaves.__setitem__(name, leaf), batch)  # noqa: B023  (at once)
        own = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dim()}
        if own and all(map(len, own.values())) and (not alike or _form(own) == _form(alike[0])):
            alike.append(own)
    if not alike:
        raise DataError("no batch has a tensor with an example in it, so there is nothing to train on")
    size = min(len(leaf) for own in alike for leaf in own.values())
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for own in alike:
        for name, leaf in own.items():
            columns[name].append(leaf[:size])
    joined = {name: torch.cat(column) for name, column in columns.items()}
    tree = map_leaves(lambda name, leaf: joined.get(name, leaf), batches[0])
    return InputPipeline(_Replay(tree, len(alike) * size), reading=Reading(parallel="inline")), size


def _form(leaves: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in leaves.items()}


class _Replay(Source):
    """Args:
    tree: of tensors `(examples, ...)`.
    length: examples.
    """

    def __init__(self, tree: Any, length: int) -> None:
        self._tree = tree
        self._length = length

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, epoch: Epoch) -> Any:
        return map_tensors(lambda tensor: tensor[index], self._tree)

    @property
    def identity(self) -> str:
        return ""

    @property
    def gathers(self) -> bool:
        return True

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        # They follow each other, so that nothing need be copied.
        first = int(indices[0]) if len(indices) else 0
        return map_tensors(lambda tensor: tensor[first : first + len(indices)], self._tree)
