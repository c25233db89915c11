"""Mailboxes for tensors of an accelerator: one copy of a message to pinned host memory, made beside what is computed.

    device   forward 0 │ forward 1 │ ...
             copying    └─► message 0 ─► event
    host     asks for forward 1, waits for the event, sends message 0

A message leaves when the next is sent, before one is received, or at the end of a batch. So all leave in the order in
which they were sent, and none waits for what comes after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace import internals
from headrace.channels.mailbox import Inbox, Outbox
from headrace.collectives.accelerators.pinned import PinnedBlocks
from headrace.errors import UsageError
from headrace.modules import memory_of
from headrace.shared_memory.layout import places

T = TypeVar("T")


class Sent:
    """Tensors that are still read after they have been sent; `buffers` is the memory of those of a module."""

    def __init__(self, tensors: Iterable[Tensor], buffers: Container[int]) -> None:
        # The next forward may write to a buffer.
        self.tensors = [each.clone() if memory_of(each) in buffers else each for each in tensors]
        self._versions = [internals.version(each) for each in self.tensors]

    def end(self) -> None:
        """Raises a `UsageError` if something else has been written to meanwhile."""
        if self._versions != [internals.version(each) for each in self.tensors]:
            raise UsageError(
                "a tensor that a stage has sent was written to before it had gone, as the forward of a later "
                "micro-batch may; let forward give a copy of it (clone), or cut elsewhere (partition)"
            )


@dataclass(frozen=True)
class _Departure:
    outbox: Outbox
    note: bytes
    sent: Sent
    copies: Sequence[Tensor]
    block: Tensor
    copied: Any


class PinnedCopies:
    """The copies of one rank's messages, to and from a device that has streams; `buffers` are as in `Sent`."""

    def __init__(self, device: torch.device, buffers: Container[int]) -> None:
        self._device, self._buffers = device, buffers
        self._blocks = PinnedBlocks(device)
        self._waiting: deque[_Departure] = deque()

    def outbox(self, inner: Outbox) -> Outbox:
        """Returns an end that sends tensors of the device by another."""
        return _PinnedOutbox(inner, self)

    def inbox(self, inner: Inbox) -> Inbox:
        """Returns an end whose messages are on the device."""
        return _PinnedInbox(inner, self)

    def start(self, outbox: Outbox, note: bytes, tensors: Sequence[Tensor]) -> None:
        """Begins to copy a message."""
        sent = Sent(tensors, self._buffers)
        sizes = [tensor.numel() * tensor.element_size() for tensor in sent.tensors]
        begins, end = places(sizes)
        block = self._blocks.take(end)
        views = [
            block[begin : begin + size].view(tensor.dtype).view(tensor.shape)
            for begin, size, tensor in zip(begins, sizes, sent.tensors, strict=True)
        ]
        copied = self._blocks.fetch(zip(views, sent.tensors, strict=True))
        self._waiting.append(_Departure(outbox, note, sent, views, block, copied))

    def leave(self) -> None:
        """Sends what has been copied, as soon as it is."""
        while self._waiting:
            each = self._waiting.popleft()
            each.copied.synchronize()
            each.sent.end()
            each.outbox.send(each.note, each.copies)
            self._blocks.give(each.block)

    def drop(self) -> None:
        """Sends nothing of a batch that has failed."""
        self._waiting.clear()

    def bring(self, data: Tensor) -> Tensor:
        """Returns bytes on the device, for what it does next."""
        block = self._blocks.take(len(data))
        block[: len(data)].copy_(data)
        there = block[: len(data)].to(self._device, non_blocking=True)
        self._blocks.give(block, self._blocks.computing().record_event())
        return there


class _PinnedOutbox(Outbox):
    def __init__(self, inner: Outbox, copies: PinnedCopies) -> None:
        self._inner, self._copies = inner, copies

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        return self._inner.moved_bytes

    def send(self, note: bytes, tensors: Sequence[Tensor]) -> None:
        self._copies.leave()
        self._copies.start(self._inner, note, tensors)

    def close(self) -> None:
        self._inner.close()


class _PinnedInbox(Inbox):
    def __init__(self, inner: Inbox, copies: PinnedCopies) -> None:
        self._inner, self._copies = inner, copies

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        return self._inner.moved_bytes

    def receive(self, read: Callable[[bytes, Tensor], T]) -> T:
        # What comes may be made of what is still here.
        self._copies.leave()
        return self._inner.receive(lambda note, data: read(note, self._copies.bring(data)))

    def close(self) -> None:
        self._inner.close()
