"""Batch normalisation over the global batch: N workers normalise as one device would.

torch's SyncBatchNorm needs GPUs and torch.distributed; this one works on any device and over any `Collective`.
Statistics are weighted by examples, so uneven shares are exact (Ioffe and Szegedy 2015, section 3; the gradient is
Algorithm 1's with sums over all workers).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.collectives.base import Collective
from headrace.errors import JobError
from headrace.internals import BatchNorm

NO_STATISTICS = "more than 1 value per channel"
"""What torch says of a batch of one example."""


class _Normalize(torch.autograd.Function):
    """Normalises `(examples, channels, ...)` by statistics over all workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, collective: Collective) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = wide.new_tensor([wide.numel() / max(1, wide.shape[1])])
        sums = torch.cat([wide.sum(dims), count])
        collective.all_reduce(sums)
        total = sums[-1]
        mean = sums[:-1] / total
        # A second pass over centred values: E[x^2] - E[x]^2 would lose digits.
        squares = (wide - _spread(mean, wide)).square().sum(dims)
        collective.all_reduce(squares)
        variance = squares / total
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _spread(mean, wide)) * _spread(scale, wide)
        ctx.save_for_backward(normal, scale, total)
        ctx.collective = collective
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return normal, mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        normal, scale, total = ctx.saved_tensors
        gradient = gradients[0]
        dims = [dim for dim in range(normal.dim()) if dim != 1]
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        ctx.collective.all_reduce(sums)
        mean_gradient, mean_product = sums / total
        centred = gradient - _spread(mean_gradient, normal) - normal * _spread(mean_product, normal)
        return (centred * _spread(scale, normal)).to(ctx.dtype), None, None


class _Replacement(nn.Module, ABC):
    """Stands for a BatchNorm layer, with the same parameters and buffers under the same names."""

    def __init__(self, layer: BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum = layer.eps, layer.momentum
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean: Tensor | None
        self.running_var: Tensor
        self.num_batches_tracked: Tensor
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))
        self.train(layer.training)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Normalises `(examples, channels, ...)`."""

    def _evaluated(self, x: Tensor) -> Tensor:
        """Normalises as in an evaluation."""
        uses_batch = self.running_mean is None
        return torch.nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, uses_batch, 0.0, self.eps
        )

    def _scaled(self, normal: Tensor) -> Tensor:
        if self.weight is not None:
            normal = normal * _spread(self.weight, normal)
        return normal if self.bias is None else normal + _spread(self.bias, normal)


class GlobalBatchNorm(_Replacement):
    """Normalises by the batch of all workers."""

    def __init__(self, layer: BatchNorm, collective: Collective) -> None:
        super().__init__(layer)
        self._collective = collective

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `(examples, channels, ...)`."""
        if not self.training:
            # Without the others, because not every worker has a share of each evaluation batch.
            return self._evaluated(x)
        normalized: tuple[Tensor, ...] = _Normalize.apply(x, self.eps, self._collective)  # type: ignore[no-untyped-call]
        normal, mean, variance, total = normalized
        if self.running_mean is not None:
            with torch.no_grad():
                move_running_averages(self, mean, variance * (total / (total - 1).clamp(min=1)))
        return self._scaled(normal).to(x.dtype)


def move_running_averages(layer: Any, mean: Tensor, variance: Tensor) -> None:
    """Moves a BatchNorm layer's running averages towards those of a batch, of which `variance` is unbiased."""
    layer.num_batches_tracked.add_(1)
    momentum = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)


class PaddedBatchNorm(_Replacement):
    """Normalises by the examples whose weight is 1, where those of padding have 0.

    Args:
        weights: `(examples,)`, of every batch; it is changed in place.
    """

    def __init__(self, layer: BatchNorm, weights: Tensor) -> None:
        super().__init__(layer)
        self._weights = weights

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `(examples, channels, ...)`."""
        if not self.training:
            return self._evaluated(x)
        if len(x) != len(self._weights):
            raise JobError(
                f"BatchNorm sees {len(x)} rows where a worker has {len(self._weights)} examples, and so cannot tell "
                "which are padding; give it one row for each example, or use mirrored"
            )
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mask = self._weights.to(wide.dtype).view(-1, *[1] * (x.dim() - 1))
        total = mask.sum() * (wide[0].numel() // wide.shape[1])
        mean = (wide * mask).sum(dims) / total
        centred = wide - _spread(mean, wide)
        variance = (centred.square() * mask).sum(dims) / total
        normal = centred * _spread(torch.rsqrt(variance + self.eps), wide)
        if self.running_mean is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                factor = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
                unbiased = variance * (total / (total - 1).clamp(min=1))
                for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
                    running.add_((now.to(running.dtype) - running) * factor)
        return self._scaled(normal).to(x.dtype)


def synchronise_batch_norm(module: nn.Module, collective: Collective) -> bool:
    """Makes every BatchNorm layer below `module` global; returns whether there was one."""
    return replace_batch_norm(module, lambda layer: GlobalBatchNorm(layer, collective))


def replace_batch_norm(module: nn.Module, make: Callable[[BatchNorm], nn.Module]) -> bool:
    """Replaces every BatchNorm layer below `module`; returns whether there was one."""
    found = False
    # Not named_children(), which leaves out the second name of a layer that has two.
    for name, child in list(internals.children(module).items()):
        if child is None:
            continue
        if isinstance(child, BatchNorm):
            setattr(module, name, make(child))
            found = True
        else:
            found = replace_batch_norm(child, make) or found
    return found


def averaged_buffers(module: nn.Module) -> list[Tensor]:
    """Returns the running statistics that this rank holds; a checkpoint has their means over workers."""
    return [
        getattr(layer, name)
        for layer in module.modules()
        if isinstance(layer, (BatchNorm, GlobalBatchNorm, PaddedBatchNorm)) and layer.running_mean is not None
        for name in ("running_mean", "running_var")
        if not getattr(layer, name).is_meta
    ]


def _spread(channels: Tensor, like: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (like.dim() - 2))
