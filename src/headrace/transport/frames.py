"""How messages, slots and blobs are cut into pieces of about a megabyte, and put together again.

    ┌──────┬─────────┬─────────┬─────────┬──      the head says what it is and which of its way, and of each payload
    │ head │ message │ payload │ payload │ ...    its slot, where in the slot it begins, and the version that it is of
    └──────┴─────────┴─────────┴─────────┴──

What does not fit into one such letter goes in several, of which the last holds the message. While one letter is being
encrypted the one before is being decrypted.
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
"""Payload of one letter, at most."""

PART_BYTES = 1 << 17
"""One payload, at most. A port has to take a part before it knows from whom it is, so it is not much."""

_PAYLOADS = 1024
MOST_PARTS = 2 + _PAYLOADS
"""Of one letter."""

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
    """What a letter is."""

    HELLO = 1
    """A link's first; the message is its layout."""
    WELCOME = 2
    """The port's answer to it."""
    PART = 3
    """More of the same follows."""
    LAST = 4
    """The rest of it, or the whole."""
    FAREWELL = 5
    """The port has ended the link; the message says why."""


@dataclass
class Payload:
    """What has been sent at once, put together.

    Attributes:
        message: of `send`.
        slots: a version and `(bytes,)` uint8, by slot.
        blob: of `send`.
    """

    message: bytes = b""
    slots: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    blob: memoryview = _NOTHING


def control_frame(kind: FrameKind, message: bytes = b"") -> Frame:
    """Returns a letter without payload."""
    return [_HEAD.pack(_FORM, kind, 0, 0), message]


def numbered(parts: Frame, number: int) -> Frame:
    """Returns a letter with its number on its way, from 0 on: encryption alone does not tell that one is missing."""
    head, *rest = parts
    return [b"".join([head[:_NUMBER_AT], _NUMBER.pack(number % _NUMBERS), head[_HEAD.size :]]), *rest]


def expect_number(parts: Sequence[bytes | memoryview], expected: int) -> None:
    """Looks at the number of a letter that `sort_of` has looked at.

    Raises:
        ValueError: it is another one than the expected.
    """
    (number,) = _NUMBER.unpack_from(parts[0], _NUMBER_AT)
    if number != expected % _NUMBERS:
        raise ValueError(f"letter {number} came where {expected % _NUMBERS} was to come: some were lost on their way")


def kind_of(parts: Sequence[bytes | memoryview]) -> FrameKind:
    """Returns what a letter is.

    Raises:
        ValueError: it is none.
    """
    if len(parts) < 2 or len(parts[0]) < _HEAD.size:
        raise ValueError(f"{len(parts)} parts are no letter")
    form, kind, count, _ = _HEAD.unpack_from(parts[0])
    if form != _FORM or len(parts) != 2 + count or len(parts[0]) != _HEAD.size + count * _ENTRY.size:
        raise ValueError(f"a letter of form {form} with {len(parts)} parts says that it has {count} payloads")
    if len(parts[1]) > LARGEST_MESSAGE:
        raise ValueError(f"a message of {len(parts[1]):,} bytes is longer than {LARGEST_MESSAGE:,}")
    return FrameKind(kind)


def to_frames(
    message: bytes,
    slots: Sequence[tuple[int, int]],
    take: Callable[[int], tuple[int, memoryview]],
    blob: bytes | bytearray | memoryview = b"",
) -> Iterator[Frame]:
    """Yields the letters of what is sent at once.

    A letter holds views, so it is to be copied before anybody writes to the slots again; the next may come later.

    Args:
        message: not longer than `LARGEST_MESSAGE`.
        slots: those to send, with their lengths in bytes.
        take: returns a slot's version and content, which must stay as it is if it is longer than a letter.
        blob: to send.
    """
    entries: list[tuple[int, int, int]] = []
    payloads, filled = Frame(), 0
    for slot, length in [*slots, *([(_BLOB, len(blob))] if blob else [])]:
        version, content, start = 0, _NOTHING, 0
        whole = min(length, PIECE_BYTES)
        while start < length or not start:
            size = min(length - start, PART_BYTES, PIECE_BYTES)
            # What fits into one letter is not begun in the one before.
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
    """Puts the letters of one sender together; it holds no more than the slots and the longest blob.

    Args:
        lengths: bytes, by slot.
        blob_bytes: the longest blob that may come.
    """

    def __init__(self, lengths: Sequence[int], blob_bytes: int) -> None:
        self._lengths = lengths
        self._blob_bytes = blob_bytes
        self._begin()

    def add(self, parts: Sequence[memoryview]) -> Payload | None:
        """Takes a letter, `PART` or `LAST`; returns what it completes.

        Raises:
            ValueError: it is no such letter, or does not follow the one before.
        """
        kind = kind_of(parts)
        if kind not in (FrameKind.PART, FrameKind.LAST):
            raise ValueError(
                f"a letter is {kind.name}, and only {FrameKind.PART.name} and {FrameKind.LAST.name} hold payload"
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
        # Copied, because small pieces would take many times their length if they were kept as they came.
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
            # What comes in one piece stays where it is.
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
