"""Weight gradients of linear layers and convolutions, apart from the gradients of their inputs.

The pass decides what becomes of a weight's gradient, the product of g, the gradient of the layer's output, and x, its
input:

    whole pass     weight.grad.addmm_(g.T, x): one product of BLAS, which has an addend; autograd would make a matrix,
                   and then add two
    split pass     g @ weight comes first, for which the stage before waits; g and x are saved, and their product is
                   made in the weight pass (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024)

To add up in place saves some 8 % of a step whose micro-batches have 64 examples and whose weights have 1024 x 1024
elements. Every other gradient (of biases, of BatchNorm, of layers with hooks, inside of torch's attention and LSTM) is
made by autograd in the first part of a split pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace import internals

_FEWEST_ELEMENTS = 1 << 16
"""Of a weight whose gradient is added up in place; for fewer a function that is written in Python costs more."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Roots(torch.autograd.Function):
    """A number that gives each root its gradient when backward starts from it."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *roots: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=roots[0].device)

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Runs backward from roots with these gradients; None is 1, for a number.

    As `torch.autograd.backward`, which imports sympy as soon as it is given a gradient: that takes each process two
    seconds of processor time.
    """
    known = [
        torch.ones_like(root) if gradient is None else gradient for root, gradient in zip(roots, gradients, strict=True)
    ]
    torch.autograd.backward(_Roots.apply(known, *roots))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Convolving:
    """How a convolution goes over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, value: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        still = (0,) * len(self.stride)
        return torch.convolution(
            value, kernel, bias, self.stride, self.padding, self.dilation, False, still, self.groups
        )

    def backward(
        self, gradient: Tensor, value: Tensor, kernel: Tensor, wanted: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of value, kernel and bias that are wanted."""
        made: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
            *(gradient, value, kernel, [len(kernel)], self.stride, self.padding, self.dilation, False),
            *([0] * len(self.stride), self.groups, wanted),
        )
        return made


@dataclass(frozen=True)
class WeightGradient:
    """A weight's gradient of one micro-batch that is still to be made; `convolving` is None for a linear layer."""

    weight: nn.Parameter
    value: Tensor
    gradient: Tensor
    convolving: _Convolving | None = None

    @torch.no_grad()
    def add(self) -> None:
        """Makes the gradient and adds it to that of the weight."""
        total = self.weight.grad
        if total is not None and self.convolving is None and total.dtype == self.value.dtype:
            total.addmm_(_rows(self.gradient).T, _rows(self.value))
        elif total is not None:
            total.add_(self.make())
        else:
            self.weight.grad = self.make().to(self.weight.dtype)

    def make(self) -> Tensor:
        """Returns the gradient."""
        if self.convolving is None:
            return _rows(self.gradient).T @ _rows(self.value)
        kernel = self.weight.to(self.value.dtype)
        made = self.convolving.backward(self.gradient, self.value, kernel, [False, True, False])[1]
        assert made is not None
        return made


class WeightGradients:
    """Calls the layers of a stage so that their weights' gradients can be added up in place, or made later."""

    def __init__(self) -> None:
        self.split = False
        self._adding = False
        self._later: list[WeightGradient] | None = None

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Adds up in place what a backward pass within makes.

        In any other pass autograd decides what becomes of a gradient: a loss may ask for that of one weight alone.
        """
        self._adding = True
        try:
            yield
        finally:
            self._adding = False

    @contextmanager
    def deferring(self) -> Iterator[list[WeightGradient]]:
        """Yields a list of the weights' gradients that a backward pass within has left to be made."""
        later: list[WeightGradient] = []
        self._later = later
        try:
            yield later
        finally:
            self._later = None

    def call(self, layer: nn.Module, value: Any) -> Any:
        """Returns `layer(value)`."""
        kind = type(layer)
        # A subclass, and a layer whose weight is made of other parameters, have a type of their own.
        if not (kind is nn.Linear or (self.split and kind in _CONVOLUTIONS)) or not self._is_plain(layer, value):
            return layer(value)
        weight: Any = layer.weight
        if torch.is_autocast_enabled(weight.device.type):
            value = value.to(torch.get_autocast_dtype(weight.device.type))
        convolving = None
        if kind is not nn.Linear:
            layer_: Any = layer
            convolving = _Convolving(layer_.stride, layer_.padding, layer_.dilation, layer_.groups)
        return _Weighted.apply(value, weight, layer.bias, convolving, self)  # type: ignore[no-untyped-call]

    def take(self, product: WeightGradient) -> Tensor | None:
        """Returns a weight's gradient for autograd; None where it is added up here, now or later."""
        if self._later is not None:
            self._later.append(product)
            return None
        if self._adding and product.convolving is None and product.weight.grad is not None:
            product.add()
            return None
        return product.make()

    def _is_plain(self, layer: nn.Module, value: Any) -> bool:
        weight: Any = layer.weight
        # A slice of a layer has a forward of its own.
        if "forward" in vars(layer) or type(weight) is not nn.Parameter or type(value) is not Tensor:
            return False
        if not value.is_floating_point():
            return False
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return False
        hooked = internals.module_hooks(layer) or internals.hooks_of_all_modules()
        # Hooks on the weight are called by autograd.
        if hooked or internals.gradient_hooks(weight) or internals.accumulation_hooks(weight):
            return False
        half = torch.is_autocast_enabled(weight.device.type)
        if not self.split:
            return weight.numel() >= _FEWEST_ELEMENTS and not half and value.dtype == weight.dtype
        padded = getattr(layer, "padding_mode", "zeros") != "zeros" or isinstance(getattr(layer, "padding", 0), str)
        batched = type(layer) is nn.Linear or value.dim() == weight.dim()
        return not padded and batched and (half or value.dtype == weight.dtype)


class _Weighted(torch.autograd.Function):
    """A linear layer or a convolution whose weight is a leaf."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        convolving: _Convolving | None,
        gradients: WeightGradients,
    ) -> Tensor:
        # Of the type that autocast computes in.
        matrix = weight.to(value.dtype)
        ctx.save_for_backward(value, matrix)
        ctx.weight, ctx.convolving, ctx.gradients = weight, convolving, gradients
        bias = None if bias is None else bias.to(value.dtype)
        return functional.linear(value, matrix, bias) if convolving is None else convolving.forward(value, matrix, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, matrix = ctx.saved_tensors
        for_value, for_weight, for_bias = ctx.needs_input_grad[:3]
        made = ctx.gradients.take(WeightGradient(ctx.weight, value, gradient, ctx.convolving)) if for_weight else None
        if ctx.convolving is not None:
            back, _, shift = ctx.convolving.backward(gradient, value, matrix, [for_value, False, for_bias])
        else:
            back = gradient @ matrix if for_value else None
            shift = _rows(gradient).sum(0) if for_bias else None
        return back, made, shift, None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
