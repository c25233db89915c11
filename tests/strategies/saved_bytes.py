"""How much autograd keeps for a stage's backward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SavedBytes:
    """Counts what autograd saves while forward runs: every storage once, without the model's parameters and buffers.

    That costs a call for each tensor that is saved, so it is not done in every step.

    Attributes:
        peak: most bytes that were kept at a time.
        largest: most bytes that were kept of one forward pass.
    """

    def __init__(self, model: Iterable[Tensor]) -> None:
        self._model = {tensor.untyped_storage().data_ptr() for tensor in model}
        self._kept: dict[tuple[int, int], dict[int, int]] = {}
        self.peak = 0
        self.largest = 0

    @contextmanager
    def counting(self, key: tuple[int, int], values: Mapping[str, Any]) -> Iterator[None]:
        """Counts what the forward of a micro-batch in a stage saves, its inputs among it."""
        kept = self._kept.setdefault(key, {})

        given = {v.untyped_storage().data_ptr(): v for v in values.values() if isinstance(v, Tensor)}
        # Of a batch that is cut they are a part of the storage.
        kept |= {place: value.numel() * value.element_size() for place, value in given.items()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._model and storage.data_ptr() not in given:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        self.largest = max(self.largest, sum(kept.values()))
        self._measure()

    def keep(self, key: tuple[int, int], tensors: Iterable[Tensor]) -> None:
        """Notes that a backward pass is done, and keeps no more than these for the weight pass."""
        # Of a batch that is cut they are a part of the storage.
        self._kept[key] = {each.untyped_storage().data_ptr(): each.numel() * each.element_size() for each in tensors}
        self._measure()

    def forget(self, key: tuple[int, int]) -> None:
        """Notes that a weight pass is done."""
        self._kept.pop(key, None)

    def _measure(self) -> None:
        self.peak = max(self.peak, sum(sum(each.values()) for each in self._kept.values()))
