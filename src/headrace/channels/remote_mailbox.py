"""From one process to another on another host: ZeroMQ over TCP, encrypted, which sends and receives while both compute.

Outbox ─► at most `slots` messages ─► a thread of ZeroMQ ══ TCP ══► a thread of ZeroMQ ─► at most `slots` ─► Inbox
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import zmq
from torch import Tensor

from headrace.channels.mailbox import Inbox, Outbox
from headrace.shared_memory.layout import places
from headrace.transport.frames import PART_BYTES
from headrace.transport.one_way import Check, Limits, PullEnd, PushEnd
from headrace.trees import as_bytes

T = TypeVar("T")

_COUNT = struct.Struct("<I")


class RemoteSender(Outbox):
    """The end that sends."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], limits: Limits, check: Check, address: str, key: bytes
    ) -> None:
        self.moved_bytes = 0
        self._end = PushEnd(context, limits, check, address, key)

    def meet(self) -> None:
        """Waits until the connection is established."""
        self._end.meet()

    def send(self, note: bytes, tensors: Sequence[Tensor]) -> None:
        contents = [_bytes(tensor) for tensor in tensors]
        sizes = [len(note), *map(len, contents)]
        parts: list[bytes | memoryview] = [_COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}q", *sizes)]
        for content in (memoryview(note), *contents):
            parts += [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]
        # ZeroMQ copies it, so that the tensors may change meanwhile.
        self._end.send(parts)
        self.moved_bytes += places(sizes)[1]

    def close(self) -> None:
        self._end.close()


class RemoteReceiver(Inbox):
    """The end that receives, at `address`, from the one that knows `key`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], limits: Limits, check: Check, host: str, encrypt: bool
    ) -> None:
        self.moved_bytes = 0
        self._end = PullEnd(context, limits, check, host, encrypt)
        self.address, self.key = self._end.address, self._end.key

    def meet(self) -> None:
        """Waits for the other end's greeting, and accepts no other connection."""
        self._end.meet()

    def receive(self, read: Callable[[bytes, Tensor], T]) -> T:
        frames = self._end.receive()
        try:
            note, data, end = _assemble([frame.buffer for frame in frames])
        except (ValueError, struct.error) as error:
            self._end.check(f"it sent what is no message: {error}")
            raise
        self.moved_bytes += end
        return read(note, data)

    def close(self) -> None:
        self._end.close()


def _bytes(tensor: Tensor) -> memoryview:
    """Returns a tensor's bytes."""
    return as_bytes(tensor.contiguous().cpu().resolve_conj().resolve_neg()).numpy().data


def _assemble(frames: Sequence[memoryview]) -> tuple[bytes, Tensor, int]:
    """Returns a message's note, its tensors' bytes, each at the next multiple of 64, and how many bytes it has.

    Raises ValueError or struct.error if the frames are no message.
    """
    (count,) = _COUNT.unpack_from(frames[0])
    sizes = struct.unpack_from(f"<{count}q", frames[0], _COUNT.size)
    if not sizes or min(sizes) < 0 or sum(sizes) != sum(map(len, frames[1:])):
        raise ValueError(f"{sum(map(len, frames[1:])):,} bytes where {sum(sizes):,} are announced")
    begins, end = places(sizes)
    content = torch.empty(end, dtype=torch.uint8)
    memory = content.numpy().data
    rest = iter(frames[1:])
    for at, size in zip(begins, sizes, strict=True):
        stop = at + size
        while at < stop:
            part = next(rest, b"")
            if not 0 < len(part) <= stop - at:
                raise ValueError(f"a part of {len(part):,} bytes where {stop - at:,} are left")
            memory[at : at + len(part)] = part
            at += len(part)
    return bytes(memory[: sizes[0]]), content[places([sizes[0], 0])[0][1] :], end
