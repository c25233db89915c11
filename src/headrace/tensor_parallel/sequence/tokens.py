"""Sequence parallelism: between split blocks each rank has some tokens of the values that plain slices have whole.

    layer, on some tokens:  norm ─► all-gather ─► split block, all tokens ─► reduce-scatter ─► dropout, sum ─► ...

The all-reduce at a block's end becomes these two, which together move as much, and norms, dropout and residual sums are
divided (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4.2.2). What
was gathered is not kept for backward, but gathered again. Parameters that all ranks have see some tokens on each, so
that their gradients are summed over ranks, once a layer.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headrace import internals
from headrace.collectives.base import Collective
from headrace.errors import UsageError
from headrace.tensor_parallel.collectives import all_gather, all_gather_to, gather_from, rows, scatter_to

INSTEAD = "leave sequence=True out"


class Tokens:
    """The values between the blocks of a chain: which of their tokens this rank has, and what was gathered last.

    Attributes:
        open: whether its first layer has run, and its last one has not.
    """

    def __init__(self, group: Collective, dim: int) -> None:
        self.group, self.dim = group, dim
        self.open = False
        self._length = 0
        self._gathered: _Gathered | None = None

    def length(self) -> int:
        """Returns how many tokens a value has on all ranks."""
        return self._length

    def scatter(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of a whole value: the chain begins."""
        self.open = True
        self._length = x.shape[self.dim]
        return scatter_to(x, self.dim, self.group)

    def join(self, x: Tensor) -> Tensor:
        """Returns all tokens, with which all ranks go on alike: the chain ends."""
        self.open = False
        return gather_from(x, self.dim, self.group, self._length)

    def gather(self, x: Tensor) -> Tensor:
        """Returns all tokens for a split block."""
        whole = all_gather_to(x, self.dim, self.group, self._length)
        self._gathered = _Gathered(x.detach(), whole, self)
        return whole

    def holds(self, x: Tensor) -> bool:
        """Tells whether a value is what was gathered last: its gradients are summed already."""
        return self._gathered is not None and self._gathered.whole() is x

    def has_own(self, x: Tensor) -> bool:
        """Tells whether a value has as many tokens as this rank, between the ends of a chain or in its backward."""
        if not self.open and internals.current_backward() == -1:
            return False
        start, stop = rows(self._length, self.group.rank, self.group.world)
        return x.dim() > self.dim and x.shape[self.dim] == stop - start

    def saving(self, x: Tensor) -> AbstractContextManager[Any]:
        """Lets a layer keep this rank's tokens of what it is given for its backward, and gather the others again."""
        found = self._gathered
        if found is None or found.whole() is not x:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(found.pack, found.unpack)


class _Gathered:
    """A value of all tokens, which is made again of this rank's."""

    def __init__(self, local: Tensor, whole: Tensor, tokens: Tokens) -> None:
        self.whole = weakref.ref(whole)
        self._local, self._version = local, internals.version(local)
        self._place = tokens.dim, tokens.group, tokens.length()
        self._address, self._count = whole.untyped_storage().data_ptr(), whole.numel()
        self._again: Tensor | None = None
        self._packed = self._left = 0

    def pack(self, saved: Tensor) -> Any:
        same = saved.untyped_storage().data_ptr() == self._address and saved.numel() == self._count
        if not same or not saved.is_contiguous():
            return saved
        self._packed += 1
        return self, saved.shape

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        again = self._again
        if again is None:
            if internals.version(self._local) != self._version:
                raise UsageError(
                    "a value that a split block was given has been changed in place, and under sequence=True backward "
                    f"gathers it again; change a copy, or {INSTEAD}"
                )
            again, self._left = all_gather(self._local, *self._place), self._packed
        # After the last user it is released.
        self._left -= 1
        self._again = again if self._left > 0 else None
        return again.view(kept[1])


def first_of(values: tuple[Any, ...]) -> Tensor | None:
    """Returns the first value that may have tokens: `(examples, tokens, features)`."""
    return next(
        (each for each in values if isinstance(each, Tensor) and each.is_floating_point() and each.dim() == 3), None
    )
