"""Which share of a batch is a backward pass of, and is it of all of it? Gradients are weighted by its examples."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.hooks import OwnHook
from headrace.trees import map_tensors


class Delivery:
    """A share that a loader has given to the script: so many `examples` of a batch `of` so many on all ranks."""

    def __init__(self, examples: int, of: int, batch: Any) -> None:
        self.examples, self.of = examples, of
        self._tensors: list[weakref.ref[Tensor]] = []
        map_tensors(lambda tensor: self._tensors.append(weakref.ref(tensor)), batch)

    @property
    def lives(self) -> bool:
        """Whether the script still has some of its tensors, and may train on it."""
        return any(tensor() is not None for tensor in self._tensors)


class Deliveries:
    """What loaders have given to the script of this process, and which of it a backward pass is of.

    That matters where ranks have unequal parts of a batch, since gradients are weighted by examples. It is the last
    share; but shares that came since the last backward pass, and that the script still has, may be meant as well.

    Attributes:
        batches: how many, of all loaders.
        epoch, index: of the last batch: how many iterations began before its own, and its place there.
        order: a digest of the examples of all batches so far.
        last: the last share.
    """

    def __init__(self) -> None:
        self.batches = self.epoch = self.index = self.order = 0
        self._iterations = -1
        self._fresh: list[Delivery] = []
        self.last: Delivery | None = None
        self._over: list[Delivery] = []
        self._kept: list[Delivery] = []

    def begin(self) -> int:
        """Notes that an iteration begins; returns its number."""
        self._iterations += 1
        return self._iterations

    def add(self, share: Delivery, epoch: int, index: int, order: int) -> None:
        self.batches += 1
        self.epoch, self.index = epoch, index
        self.order = zlib.crc32(order.to_bytes(4, "little"), self.order)
        self.last = share
        self._fresh.append(share)
        self._over = []

    def keep(self, share: Delivery, order: int) -> None:
        """Notes a share of what the script itself has read: while that lives, any backward pass may be of it."""
        self.add(share, self.epoch, self.index + 1, order)
        self._kept = [*(one for one in self._kept if one.lives), share]

    def end(self, shares: Iterable[Delivery]) -> None:
        """Notes that an iteration has given all its shares: a script that has them in a list may still train on any."""
        self._over = list(shares)

    def leave(self, shares: Iterable[Delivery]) -> None:
        """Notes that an iteration was left before its end: its shares were to be looked at, or are trained on."""
        left = set(shares)
        self._fresh = [share for share in self._fresh if share not in left]

    def current(self) -> Delivery | None:
        """Returns the share of which the current backward pass is; None before the first.

        Raises:
            UsageError: it may be one of several, whose parts of their batches differ.
        """
        last = self.last
        fresh = [share for share in self._fresh if share is last or share.lives]
        # While several may be meant, none counts as done.
        self._fresh = fresh if len(fresh) > 1 else []
        meant = fresh or [share for share in self._over if share is last or share.lives]
        meant += [share for share in self._kept if share.lives]
        parts = sorted({(share.examples, share.of) for share in meant})
        if any(examples * parts[0][1] != parts[0][0] * of for examples, of in parts):
            listed = " and ".join(f"{examples} of {of}" for examples, of in parts[:3])
            raise UsageError(
                f"this process has shares of {listed} examples that its loaders or share() gave before this backward "
                "pass, and gradients are weighted by that part: which of them the loss is of is not known. Call "
                "backward() for each batch before the next one is taken, or let all ranks have equal parts: "
                "drop_last=True, and a batch size that the number of processes divides"
            )
        return last


class ForwardCounts:
    """Counts the examples that a model's forward gets, where no call gets all of its share."""

    def __init__(self, model: nn.Module, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._examples = 0
        self._is_whole = False
        model.register_forward_pre_hook(OwnHook(self._see), with_kwargs=True)

    def take(self) -> int:
        """Returns how many examples forward got since the last call; 0 where a call got all of a share."""
        examples = 0 if self._is_whole else self._examples
        self._examples, self._is_whole = 0, False
        return examples

    def _see(self, model: nn.Module, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        share = None if torch.compiler.is_compiling() else self._deliveries.last
        if share is None or not share.examples or not model.training or not torch.is_grad_enabled():
            return
        first = next((value for value in (*values, *named.values()) if isinstance(value, Tensor) and value.dim()), None)
        if first is None:
            return
        # There may be several rows for an example, the batch may be another dim than the first, and one row may have
        # all sequences side by side.
        is_packed = len(first) == 1 and first.dim() > 1 and first.shape[1] >= share.examples
        self._is_whole |= len(first) >= share.examples or share.examples in first.shape or is_packed
        self._examples += len(first)
