"""A worker's gradients on their way to the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from headrace.parameter_server.wire.layout import ShardLayout
from headrace.spec.model import ModelSpec
from headrace.training.clipping import clip_coefficient, squared_norm


class GradientBuffer:
    """What a backward pass brought, as the servers' shards of it.

    Args:
        forms: by server.
        model: whose trainable parameters come in this order.
    """

    def __init__(self, forms: Sequence[ShardLayout], model: ModelSpec) -> None:
        self._forms = forms
        self._index = {parameter.name: index for index, parameter in enumerate(model.trainable)}
        self._pushed = {self._index[piece.parameter] for form in forms for piece in form.pieces if not piece.exact}
        self._gradients: list[Tensor | None] = [None] * len(self._index)

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = list(gradients)

    def store_nothing(self) -> None:
        self._gradients = [None] * len(self._index)

    def add(self, others: GradientBuffer, factor: float = 1.0) -> None:
        """Adds others times a factor, into memory of its own: autograd may give one tensor to two parameters."""
        self._gradients = [
            own if other is None else _times(other, factor) if own is None else torch.add(own, other, alpha=factor)
            for own, other in zip(self._gradients, others._gradients, strict=True)
        ]

    def multiply(self, factor: float) -> None:
        """Multiplies all, into memory of its own."""
        self._gradients = [None if own is None else own * factor for own in self._gradients]

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """One a trainable parameter; None where the loss does not depend on it."""
        return tuple(self._gradients)

    @property
    def present(self) -> list[Tensor]:
        """The gradients that there are."""
        return [gradient for gradient in self._gradients if gradient is not None]

    def clip(
        self, value: float | None, norm: float | None, total: Callable[[Sequence[float]], list[float]] | None = None
    ) -> None:
        """Clips elements, then the norm of all, as torch does, bit for bit; None leaves them.

        Args:
            value: the largest that an element may be.
            norm: the largest that the norm may be.
            total: where a gradient is held by several ranks, sums numbers over them, who all call this.
        """
        clipped = self.present
        if (not clipped and total is None) or (value is None and norm is None):
            return
        # Into other memory: autograd may give one tensor as the gradient of two parameters.
        if value is not None:
            clipped = list(torch._foreach_clamp_max(torch._foreach_clamp_min(clipped, -value), value))
        if norm is not None and total is not None:
            # What several hold is measured by whoever pushes it.
            there = [index for index, gradient in enumerate(self._gradients) if gradient is not None]
            own = [gradient for index, gradient in zip(there, clipped, strict=True) if index in self._pushed]
            (squared,) = total([squared_norm(own)])
            factor = clip_coefficient(norm, squared)
            clipped = [gradient * factor for gradient in clipped]
        elif norm is not None:
            coefficient = torch.clamp(norm / (nn.utils.get_total_norm(clipped) + 1e-6), max=1.0)
            clipped = list(torch._foreach_mul(clipped, coefficient))
        left = iter(clipped)
        self._gradients = [None if gradient is None else next(left) for gradient in self._gradients]

    def by_shard(self) -> list[list[Tensor | None]]:
        """Returns the gradients by server and shard; None where the loss does not depend on the parameter."""
        flat = [None if gradient is None else gradient.reshape(-1) for gradient in self._gradients]
        return [[self._cut(flat[self._index[piece.parameter]], form, shard) for shard, piece in enumerate(form.pieces)]
                for form in self._forms]  # fmt: skip

    def _cut(self, flat: Tensor | None, form: ShardLayout, shard: int) -> Tensor | None:
        piece = form.pieces[shard]
        return None if flat is None else flat[piece.start : piece.start + piece.elements].view(piece.shape)


class GradientAccumulator:
    """The sum of several steps' gradients, each with its share of a round.

    Where the shares are not alike (the last batch of an epoch is short), a gradient counts by its own: the sum times
    the mean share is the sum of all gradients times their shares.

    Args:
        forms: by server.
        model: as of `GradientBuffer`.
        weighed: whether shares count; else the sum is the plain one.
    """

    def __init__(self, forms: Sequence[ShardLayout], model: ModelSpec, weighed: bool) -> None:
        self._new = partial(GradientBuffer, forms, model)
        self._weighed = weighed
        self._sum = self._new()
        self._shares: list[float] = []

    def add(self, held: GradientBuffer, share: float) -> None:
        """Adds the gradients of one step; those of no examples are none."""
        if share:
            self._shares.append(share)
            self._sum.add(held, share / self._shares[0] if self._weighed else 1.0)

    def take(self) -> tuple[list[list[Tensor | None]], float, int]:
        """Returns the sum by server and shard, the mean share, and of how many steps they are; then there are none."""
        held, shares, self._sum, self._shares = self._sum, self._shares, self._new(), []
        if len(set(shares)) < 2:
            return held.by_shard(), shares[0] if shares else 0.0, len(shares)
        mean = sum(shares) / len(shares)
        if self._weighed:
            held.multiply(shares[0] / mean)
        return held.by_shard(), mean, len(shares)


def _times(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1 else gradient * factor
