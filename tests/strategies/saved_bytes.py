"""How much autograd keeps for a stage's backward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headrace.pipeline.runner import Runner
from headrace.pipeline.schedules.schedule import PassKind


class SavedBytes:
    """Counts what autograd saves while forward runs: every storage once, without the model's parameters and buffers.

    Attributes:
        peak: most bytes that were kept at a time.
        largest: most bytes that were kept of one forward pass.
    """

    def __init__(self, runner: Runner, module: nn.Module) -> None:
        self._model = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
        self._kept: dict[tuple[int, int], dict[int, int]] = {}
        self.peak = 0
        self.largest = 0
        self._follow(runner)

    def _follow(self, runner: Any) -> None:
        do, run_stage = runner._do, runner._run_stage

        def done(action: Any, *rest: Any) -> None:
            do(action, *rest)
            key = action.stage, action.micro_batch
            if action.kind is PassKind.BACKWARD_WEIGHT:
                self._kept.pop(key, None)
            elif action.backward:
                self._keep(
                    key, [each for later in runner._weights.get(key, ()) for each in (later.value, later.gradient)]
                )

        def ran(key: tuple[int, int], micro_batch: Any, saved: Any, first: bool) -> Any:
            with self._counting(key, saved.values):
                return run_stage(key, micro_batch, saved, first)

        runner._do, runner._run_stage = done, ran

    @contextmanager
    def _counting(self, key: tuple[int, int], values: Mapping[str, Any]) -> Iterator[None]:
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

    def _keep(self, key: tuple[int, int], tensors: Iterable[Tensor]) -> None:
        """Notes that a backward pass is done, and keeps no more than these for the weight pass."""
        # Of a batch that is cut they are a part of the storage.
        self._kept[key] = {each.untyped_storage().data_ptr(): each.numel() * each.element_size() for each in tensors}
        self._measure()

    def _measure(self) -> None:
        self.peak = max(self.peak, sum(sum(each.values()) for each in self._kept.values()))
