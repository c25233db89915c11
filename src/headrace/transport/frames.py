"""Divides messages, slots and blobs into frames of about a megabyte, and reassembles them.

    ┌──────┬─────────┬─────────┬─────────┬──      the head has the kind and number of the frame, and of each payload
    │ head │ message │ payload │ payload │ ...    its slot, where in the slot it begins, and its version
    └──────┴─────────┴─────────┴─────────┴──

What does not fit into one frame goes into several, of which the last holds the message. While one frame is encrypted
the one before is decrypted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from headrace.transport.base import LARGEST_MESSAGE

PIECE_BYTES = 1 << 20
"""Payload of one frame, at most."""

PART_BYTES = 1 << 17
"""One payload, at most; small, because a server reads it before it knows who has sent it."""

_PAYLOADS = 1024
MOST_PARTS = 2 + _PAYLOADS
"""Of one frame."""

_BLOB = -1
_NOTHING = memoryview(b"")
_HEAD = struct.Struct("<BBHI")
_NUMBER = struct.Struct("<I")
_NUMBER_AT = 4
_ENTRY = struct.Struct("<iqq")
_FORM = 1
_NUMBERS = 1 << 32

Frame = list[bytes | memoryview]
"""Head, message, payloads."""


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """A client's first; the message is its layout."""
    WELCOME = 2
    """The server's answer to it."""
    PART = 3
    """More frames of the same message follow."""
    LAST = 4
    """The last frame of a message, or its only one."""
    FAREWELL = 5
    """The server has ended the connection; the message says why."""


@dataclass
class Payload:
    """What one call of `send` has sent; `slots` has a version and the content, `(bytes,)` uint8, by slot."""

    message: bytes = b""
    slots: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    blob: memoryview = _NOTHING


def control_frame(kind: FrameKind, message: bytes = b"") -> Frame:
    """Returns a frame without payload."""
    return [_HEAD.pack(_FORM, kind, 0, 0), message]


def numbered(parts: Frame, number: int) -> Frame:
    """Returns a frame with its number on this connection, from 0: encryption alone does not detect a lost frame."""
    head, *rest = parts
    return [b"".join([head[:_NUMBER_AT], _NUMBER.pack(number % _NUMBERS), head[_HEAD.size :]]), *rest]


def expect_number(parts: Sequence[bytes | memoryview], expected: int) -> None:
    """Checks the number of a frame that `kind_of` has checked; raises ValueError if it is another one."""
    (number,) = _NUMBER.unpack_from(parts[0], _NUMBER_AT)
    if number != expected % _NUMBERS:
        raise ValueError(f"frame {number} arrived instead of {expected % _NUMBERS}: frames were lost")


def kind_of(parts: Sequence[bytes | memoryview]) -> FrameKind:
    """Returns what a frame is; raises ValueError if it is not a frame."""
    if len(parts) < 2 or len(parts[0]) < _HEAD.size:
        raise ValueError(f"{len(parts)} parts are not a frame")
    form, kind, count, _ = _HEAD.unpack_from(parts[0])
    if form != _FORM or len(parts) != 2 + count or len(parts[0]) != _HEAD.size + count * _ENTRY.size:
        raise ValueError(f"a frame of version {form} with {len(parts)} parts says that it has {count} payloads")
    if len(parts[1]) > LARGEST_MESSAGE:
        raise ValueError(f"a message of {len(parts[1]):,} bytes is longer than {LARGEST_MESSAGE:,}")
    return FrameKind(kind)


def to_frames(
    message: bytes,
    slots: Sequence[tuple[int, int]],
    take: Callable[[int], tuple[int, memoryview]],
    blob: bytes | bytearray | memoryview = b"",
) -> Iterator[Frame]:
    """Yields the frames of a message with the content of some slots, given as (slot, bytes), and a blob.

    `take` returns a slot's version and content, which must not change if it is longer than a frame. A frame holds
    views, so it has to be sent or copied before the slots are written to again; the next frame may be taken later.
    """
    entries: list[tuple[int, int, int]] = []
    payloads, filled = Frame(), 0
    for slot, length in [*slots, *([(_BLOB, len(blob))] if blob else [])]:
        version, content, start = 0, _NOTHING, 0
        whole = min(length, PIECE_BYTES)
        while start < length or not start:
            size = min(length - start, PART_BYTES, PIECE_BYTES)
            # What fits into one frame is not divided.
            next_size, next_count = (size, 1) if start else (whole, -(-whole // PART_BYTES))
            if payloads and (filled + next_size > PIECE_BYTES or len(payloads) + next_count > _PAYLOADS):
                yield [_head(FrameKind.PART, entries), b"", *payloads]
                entries, payloads, filled = [], Frame(), 0
            if not start:
                version, content = (0, memoryview(blob)) if slot == _BLOB else take(slot)
            entries.append((slot, start, version))
            payloads.append(content[start : start + size])
            filled += size
            start += max(size, 1)
    yield [_head(FrameKind.LAST, entries), message, *payloads]


class Reassembler:
    """Reassembles the frames of one sender; its memory is limited to the slots' `lengths` and the longest blob."""

    def __init__(self, lengths: Sequence[int], blob_bytes: int) -> None:
        self._lengths = lengths
        self._blob_bytes = blob_bytes
        self._begin()

    def add(self, parts: Sequence[memoryview]) -> Payload | None:
        """Takes the next `PART` or `LAST`; returns the payload if it completes one; raises ValueError for another."""
        kind = kind_of(parts)
        if kind not in (FrameKind.PART, FrameKind.LAST):
            raise ValueError(
                f"a frame is {kind.name}, and only {FrameKind.PART.name} and {FrameKind.LAST.name} hold payload"
            )
        entries = _ENTRY.iter_unpack(parts[0][_HEAD.size :])
        for (slot, start, version), content in zip(entries, parts[2:], strict=True):
            if slot == _BLOB:
                self._extend_blob(start, content)
            else:
                self._put(slot, start, version, content)
        if kind == FrameKind.PART:
            return None
        unfinished = [slot for slot, filled in self._filled.items() if filled != self._lengths[slot]]
        if unfinished:
            raise ValueError(f"slot {unfinished[0]} came with {self._filled[unfinished[0]]:,} bytes only")
        payload = Payload(bytes(parts[1]), self._slots, memoryview(self._blob))
        self._begin()
        return payload

    def _begin(self) -> None:
        self._slots: dict[int, tuple[int, Tensor]] = {}
        self._filled: dict[int, int] = {}
        self._blob = bytearray()

    def _extend_blob(self, start: int, content: memoryview) -> None:
        # Copied, because small pieces would take many times their length as objects of their own.
        if start != len(self._blob) or start + len(content) > self._blob_bytes:
            raise ValueError(
                f"a blob has a piece of {len(content):,} bytes at {start:,}, after {len(self._blob):,}; "
                f"the longest that may come has {self._blob_bytes:,}"
            )
        self._blob += content

    def _put(self, slot: int, start: int, version: int, content: memoryview) -> None:
        if not 0 <= slot < len(self._lengths):
            raise ValueError(f"there is no slot {slot}, only {len(self._lengths)}")
        length, filled, size = self._lengths[slot], self._filled.get(slot, 0), len(content)
        twice = start == 0 and slot in self._slots
        if start != filled or start + size > length or twice or (not size and length):
            raise ValueError(
                f"slot {slot} of {length:,} bytes has a piece of {size:,} bytes at {start:,}, after {filled:,}"
            )
        if start == 0:
            # What arrives in one piece is not copied.
            whole = size == length > 0
            place = torch.frombuffer(content, dtype=torch.uint8) if whole else torch.empty(length, dtype=torch.uint8)
            self._slots[slot] = (version, place)
            self._filled[slot] = size
            if whole:
                return
        elif self._slots[slot][0] != version:
            raise ValueError(f"slot {slot} comes in pieces of versions {self._slots[slot][0]} and {version}")
        if size:
            self._slots[slot][1][start : start + size].copy_(torch.frombuffer(content, dtype=torch.uint8))
            self._filled[slot] = start + size


def _head(kind: FrameKind, entries: Sequence[tuple[int, int, int]]) -> bytes:
    return _HEAD.pack(_FORM, kind, len(entries), 0) + b"".join([_ENTRY.pack(*entry) for entry in entries])
