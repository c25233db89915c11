"""Messages between processes of one host: copied once into shared memory, and once out of it.

                 slot 0   note, tensor, tensor, ...
    Sender  ──►  slot 1   note, tensor, ...           ──►  Receiver
                 ...

Messages arrive in the order in which they were sent. The sender waits while all slots are full, the receiver while its
next one is empty. A slot's memory belongs to the sender, who makes a larger one where a message is longer than any
before; the receiver finds it through what the slot's head says.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import Structure, c_int32, c_int64
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from headrace.shared_memory import futex
from headrace.shared_memory.control_page import SegmentOffer
from headrace.shared_memory.futex import Spin
from headrace.shared_memory.layout import LINE, places
from headrace.shared_memory.segment import SharedSegment

T = TypeVar("T")

_SPIN_S = 50e-6
_SLICE_S = 0.05
_EMPTY, _FULL = 0, 1
_NOTHING = torch.empty(0, dtype=torch.uint8)

Check = Callable[[Callable[[], bool]], None]


class _End(ABC):
    moved_bytes: int

    @abstractmethod
    def close(self) -> None:
        """Releases memory and connections."""


class Outbox(_End):
    """The end of a mailbox that sends."""

    @abstractmethod
    def send(self, note: bytes, tensors: Sequence[Tensor]) -> None:
        """Copies a message of dense tensors, as soon as there is room for it; the note says what they are."""


class Inbox(_End):
    """The end of a mailbox that receives."""

    @abstractmethod
    def receive(self, read: Callable[[bytes, Tensor], T]) -> T:
        """Returns what `read(note, tensors)` makes of the next message, as soon as that is there.

        It gets the bytes of the tensors one after the other, each at the next multiple of 64, and copies what it keeps.
        """


def head_bytes(slots: int) -> int:
    """Returns the length of the shared region that sender and receiver find each other by."""
    return LINE * slots


class _Head(Structure):
    """What the two ends tell each other of a slot, which is `_EMPTY` or `_FULL`, and of the message in it."""

    state: int
    offer: SegmentOffer
    generation: int
    note_bytes: int
    nbytes: int
    _fields_ = [
        ("state", c_int32),
        ("offer", SegmentOffer),
        *((name, c_int64) for name in ("generation", "note_bytes", "nbytes")),
    ]


class _Slot:
    def __init__(self, heads: Tensor, index: int) -> None:
        # The head lies in the tensor's memory and does not keep it alive.
        self._kept = heads[index * LINE : (index + 1) * LINE]
        self.address = self._kept.data_ptr()
        self.head = _Head.from_address(self.address)
        self.segment: SharedSegment | None = None
        self.content = _NOTHING

    @property
    def memory(self) -> SharedSegment:
        assert self.segment is not None
        return self.segment

    def hold(self, segment: SharedSegment) -> None:
        """Puts messages into another segment from now on."""
        self.close()
        self.segment, self.content = segment, segment.tensor()

    def give(self, state: int) -> None:
        """Passes the slot to the other end."""
        futex.fence()
        self.head.state = state
        futex.wake(self.address)

    def close(self) -> None:
        """Releases the memory."""
        if self.segment:
            self.segment.close()
        self.segment, self.content = None, _NOTHING


class _Ring:
    """The slots, as one end sees them."""

    def __init__(self, heads: Tensor, check: Check) -> None:
        self._slots = [_Slot(heads, index) for index in range(len(heads) // LINE)]
        self._check = check
        self._spin = Spin(_SPIN_S)
        self.turn = 0

    def close(self) -> None:
        """Releases the memory."""
        for slot in self._slots:
            slot.close()

    def next(self, wanted: int) -> _Slot:
        """Waits until the next slot is full, or empty."""
        slot = self._slots[self.turn]
        self.turn = (self.turn + 1) % len(self._slots)
        began = perf_counter()
        give_up = began + self._spin.seconds
        while slot.head.state != wanted:
            if perf_counter() > give_up:
                self._sleep(slot, wanted, began)
                break
        else:
            self._spin.met()
        futex.fence()
        return slot

    def _sleep(self, slot: _Slot, wanted: int, began: float) -> None:
        while slot.head.state != wanted:
            futex.wait(slot.address, 1 - wanted, _SLICE_S)
            if slot.head.state != wanted and perf_counter() - began > _SLICE_S:
                self._check(lambda: slot.head.state == wanted)
        self._spin.slept(perf_counter() - began)


class Sender(Outbox):
    """The end that sends; `heads` is `(head_bytes(slots),)` uint8, zeroed, the same for both ends.

    `check` is called about every 50 ms of waiting, with what tells whether the other end has come after all; it raises
    where it never will.
    """

    def __init__(self, heads: Tensor, check: Check) -> None:
        self._ring = _Ring(heads, check)
        self.moved_bytes = 0

    def send(self, note: bytes, tensors: Sequence[Tensor]) -> None:
        sizes = [len(note), *(tensor.numel() * tensor.element_size() for tensor in tensors)]
        begins, end = places(sizes)
        slot = self._ring.next(_EMPTY)
        if slot.segment is None or slot.segment.nbytes < end:
            # The receiver has opened the old one, for the slot is empty. A quarter more, because the next message
            # may be a little longer.
            slot.hold(SharedSegment.create(max(LINE, end + end // 4), "mailbox"))
            slot.head.generation += 1
            slot.head.offer.publish(os.getpid(), slot.memory.descriptor, slot.memory.nbytes)
        slot.memory.memory[: len(note)] = note
        for begin, size, tensor in zip(begins[1:], sizes[1:], tensors, strict=True):
            if size:
                slot.content[begin : begin + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        slot.head.note_bytes, slot.head.nbytes = len(note), end
        self.moved_bytes += end
        slot.give(_FULL)

    def close(self) -> None:
        self._ring.close()


class Receiver(Inbox):
    """The end that receives."""

    def __init__(self, heads: Tensor, check: Check) -> None:
        self._ring = _Ring(heads, check)
        self._seen = [0] * (len(heads) // LINE)
        self.moved_bytes = 0

    def receive(self, read: Callable[[bytes, Tensor], T]) -> T:
        index = self._ring.turn
        slot = self._ring.next(_FULL)
        note_bytes, end = slot.head.note_bytes, slot.head.nbytes
        if slot.head.generation != self._seen[index]:
            self._seen[index] = slot.head.generation
            slot.hold(slot.head.offer.open())
        (_, begin), _ = places([note_bytes, 0])
        result = read(bytes(slot.memory.memory[:note_bytes]), slot.content[begin:end])
        self.moved_bytes += end
        slot.give(_EMPTY)
        return result

    def close(self) -> None:
        self._ring.close()
