"""Weight gradients of linear layers that are added up by the multiplication that makes them.

Autograd makes a micro-batch's gradient of a weight, and then adds it to that of the micro-batches before:

    made = g.T @ x;  weight.grad += made        a pass over three matrices of the weight's size, beside the product
    weight.grad.addmm_(g.T, x)                  none: the product of BLAS has an addend

That is some 8 % of a step whose micro-batches have 64 examples and whose weights have 1024 x 1024 elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules

_FEWEST_ELEMENTS = 1 << 16
"""Of a weight; to add up fewer costs no more than to call a function that is written in Python."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Accumulation:
    """Calls linear layers so that their weights' gradients can be added up in place."""

    def __init__(self) -> None:
        self._goes_on = False

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Adds up in place what a backward pass within makes.

        In any other pass autograd decides what becomes of a gradient: a loss may ask for that of one weight alone.
        """
        self._goes_on = True
        try:
            yield
        finally:
            self._goes_on = False

    def call(self, layer: nn.Module, value: Any) -> Any:
        """Returns `layer(value)`."""
        if self._can_add(layer, value):
            return _Linear.apply(value, layer.weight, layer.bias, self)  # type: ignore[no-untyped-call]
        return layer(value)

    def adds_to(self, weight: Tensor) -> bool:
        """Whether this pass's gradient of the weight is to be added to what it has."""
        return self._goes_on and weight.grad is not None

    def _can_add(self, layer: nn.Module, value: Any) -> bool:
        # A subclass, and a layer whose weight is made of other parameters, have a type of their own.
        if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or type(value) is not Tensor:
            return False
        weight = layer.weight
        if not (torch.is_grad_enabled() and weight.requires_grad and weight.numel() >= _FEWEST_ELEMENTS):
            return False
        hooked = any(vars(layer)[hooks] or vars(modules)[f"_global{hooks}"] for hooks in _HOOKS)
        # Who wants to know of the weight's gradient is told by autograd.
        heard = weight._backward_hooks or weight._post_accumulate_grad_hooks
        return not (hooked or heard or torch.is_autocast_enabled(weight.device.type) or value.dtype != weight.dtype)


class _Linear(torch.autograd.Function):
    """`functional.linear` of a weight that is a leaf."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, accumulation: Accumulation) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.accumulation = accumulation
        return functional.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), value.reshape(-1, value.shape[-1])
        for_value, _, for_bias, _ = ctx.needs_input_grad
        made = None
        if ctx.accumulation.adds_to(weight):
            weight.grad.addmm_(rows.T, inputs)
        else:
            made = rows.T @ inputs
        return gradient @ weight if for_value else None, made, rows.sum(0) if for_bias else None, None
