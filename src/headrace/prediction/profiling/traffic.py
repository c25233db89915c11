"""What of a model travels between workers that divide sequences or experts: counted in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.batches import call, examples_of
from headrace.errors import UsageError
from headrace.expert_parallel.balance import with_router_loss
from headrace.expert_parallel.finding import ExpertSet, find_experts
from headrace.fully_sharded.units import find_units, unit_parameters
from headrace.modules import set_train_modes
from headrace.spec.compute import ExpertTraffic, Traffic
from headrace.training.user_code.trial import unchanged, without_compilers
from headrace.trees import tensors_of


def traffic_of(module: nn.Module, batch: Any, inputs: Any) -> Traffic:
    """Returns what one example of a batch makes travel; the module stays as it is."""
    try:
        experts: Sequence[ExpertSet] = find_experts(module)
    except UsageError:
        experts = ()
    try:
        rest = sum(each.nbytes for each in unit_parameters(module, find_units(module, "auto"))[""].values())
    except UsageError:
        rest = 0
    attended, routed = _Attended(), _Routed()
    counts = [_ExpertCalls(each) for each in experts]
    with ExitStack() as stack:
        for context in (torch.no_grad(), unchanged(module), without_compilers(), with_router_loss(module, routed)):
            stack.enter_context(context)
        set_train_modes(module)
        for each in counts:
            each.follow(stack)
        with attended:
            call(module, batch, inputs)
    examples = examples_of(batch)
    found = tuple(each.traffic(examples) for each in counts if each.rows)
    return Traffic(rest, attended.nbytes / examples, found, routed.nbytes / examples)


class _Attended(TorchFunctionMode):
    """Counts the keys and values of attention."""

    nbytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            self.nbytes += sum(each.nbytes for each in (*args, *(kwargs or {}).values())[1:3])
        return func(*args, **(kwargs or {}))


class _Routed:
    """Counts the outputs of routers that the router's loss is made of."""

    nbytes = 0

    def loss(self, original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        self.nbytes += sum(each.nbytes for each in tensors_of(logits))
        return original(logits, *args, **kwargs)


class _ExpertCalls:
    """Counts the tokens of a layer's experts: of stacked ones once each, of a list once for each of its experts."""

    def __init__(self, experts: ExpertSet) -> None:
        self.rows = self._row_bytes = 0
        self._experts, self._chosen = experts, 1

    def follow(self, stack: ExitStack) -> None:
        module = self._experts.module
        for each in (module,) if self._experts.stacked else module.children():
            stack.callback(each.register_forward_hook(partial(self._note), with_kwargs=True).remove)

    def traffic(self, examples: int) -> ExpertTraffic:
        trained = sum(each.nbytes for each in self._experts.module.parameters() if each.requires_grad)
        return ExpertTraffic(self._experts.count, self._chosen, self.rows / examples, self._row_bytes, trained)

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        tokens, *more = tensors_of((args, kwargs))
        rows = tokens.numel() // tokens.shape[-1]
        if not rows:
            return
        self.rows += rows
        # There and back; of what is no whole number there is a gradient, too.
        travels = (tokens, *more, output)
        self._row_bytes = sum(each.nbytes * (1 + each.is_floating_point()) for each in travels) // rows
        if self._experts.stacked:
            self._chosen = more[0].shape[-1]
