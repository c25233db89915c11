"""From one process of a host to another: what is sent is copied once into shared memory, and once out of it.

                 slot 0   note, tensor, tensor, ...
    Sender  ──►  slot 1   note, tensor, ...           ──►  Receiver
                 ...

Messages arrive in the order in which they were sent. The sender waits while all slots are full, the receiver while its
next one is empty. A slot's memory belongs to the sender, who makes a larger one where a message is longer than any
before; the receiver finds it through what the slot's head says.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from headrace.shared_memory import futex
from headrace.shared_memory.futex import Spin
from headrace.shared_memory.segment import SharedSegment

T = TypeVar("T")

_HEAD = 64
_LINE = 64
_SPIN_S = 50e-6
_SLICE_S = 0.05
_EMPTY, _FULL = 0, 1
_NOTHING = torch.empty(0, dtype=torch.uint8)

Check = Callable[[Callable[[], bool]], None]


class Outbox(ABC):
    """The end of a mailbox that sends.

    Attributes:
        moved_bytes: that were sent.
    """

    moved_bytes: int

    @abstractmethod
    def send(self, note: bytes, tensors: Sequence[Tensor]) -> None:
        """Copies a message, as soon as there is room for it.

        Args:
            note: what the receiver needs to know of the tensors.
            tensors: dense ones, on any device.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of what it holds of the machine."""


class Inbox(ABC):
    """The end of a mailbox that receives.

    Attributes:
        moved_bytes: that were received.
    """

    moved_bytes: int

    @abstractmethod
    def receive(self, read: Callable[[bytes, Tensor], T]) -> T:
        """Returns what `read(note, tensors)` makes of the next message, as soon as that is there.

        Args:
            read: takes the note, and the bytes of the tensors one after the other, each at the next multiple of 64.
                It copies what it keeps.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of what it holds of the machine."""


def head_bytes(slots: int) -> int:
    """Returns the length of the shared region that sender and receiver find each other by."""
    return _HEAD * slots


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where pieces of so many bytes begin that lie one after the other, and where the last ends."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // _LINE) * _LINE
    return begins, end


class _Slot:
    """One slot's head: [full, pid, descriptor, bytes of the memory, which memory, bytes of the note, of the rest]."""

    def __init__(self, heads: Tensor, index: int) -> None:
        head = heads[index * _HEAD : (index + 1) * _HEAD]
        self.address = head.data_ptr()
        # Not through numpy, so that nothing else counts on how torch lends its memory.
        memory = memoryview((ctypes.c_char * _HEAD).from_address(self.address)).cast("B")
        self._kept = head
        self.full = memory[:4].cast("i")
        self.numbers = memory[8:].cast("q")
        self.segment: SharedSegment | None = None
        self.content = _NOTHING

    @property
    def memory(self) -> SharedSegment:
        """What holds the message."""
        assert self.segment is not None
        return self.segment

    def hold(self, segment: SharedSegment) -> None:
        """Lets messages be in another piece of memory from now on."""
        self.close()
        self.segment, self.content = segment, segment.tensor()

    def give(self, state: int) -> None:
        """Leaves the slot to the other end."""
        futex.fence()
        self.full[0] = state
        futex.wake(self.address)

    def close(self) -> None:
        """Lets go of the memory."""
        if self.segment:
            self.segment.close()
        self.segment, self.content = None, _NOTHING


class _Ring:
    """The slots, as one end sees them.

    Args:
        heads: `(head_bytes(slots),)` uint8, zeroed, the same for both ends.
        check: as for `Sender`.

    Attributes:
        turn: index of the slot that is next.
    """

    def __init__(self, heads: Tensor, check: Check) -> None:
        self._slots = [_Slot(heads, index) for index in range(len(heads) // _HEAD)]
        self._check = check
        self._spin = Spin(_SPIN_S)
        self.turn = 0

    def close(self) -> None:
        """Lets go of the memory."""
        for slot in self._slots:
            slot.close()

    def next(self, wanted: int) -> _Slot:
        """Waits until the next slot is full, or empty."""
        slot = self._slots[self.turn]
        self.turn = (self.turn + 1) % len(self._slots)
        began = perf_counter()
        give_up = began + self._spin.seconds
        while slot.full[0] != wanted:
            if perf_counter() > give_up:
                self._sleep(slot, wanted, began)
                break
        else:
            self._spin.met()
        futex.fence()
        return slot

    def _sleep(self, slot: _Slot, wanted: int, began: float) -> None:
        while slot.full[0] != wanted:
            futex.wait(slot.address, 1 - wanted, _SLICE_S)
            if slot.full[0] != wanted and perf_counter() - began > _SLICE_S:
                self._check(lambda: slot.full[0] == wanted)
        self._spin.slept(perf_counter() - began)


class Sender(Outbox):
    """The end that sends.

    Args:
        heads: `(head_bytes(slots),)` uint8, zeroed, the same for both ends.
        check: called about every 50 ms of waiting, with what tells whether the other end has come after all; raises
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
            # Whoever receives has opened the old one, for the slot is empty. A quarter more, because the next message
            # may be a little longer.
            slot.hold(SharedSegment.create(max(_LINE, end + end // 4), "mailbox"))
            slot.numbers[3] += 1
            slot.numbers[0], slot.numbers[1] = os.getpid(), slot.memory.descriptor
            slot.numbers[2] = slot.memory.nbytes
        slot.memory.memory[: len(note)] = note
        for begin, size, tensor in zip(begins[1:], sizes[1:], tensors, strict=True):
            if size:
                slot.content[begin : begin + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        slot.numbers[4], slot.numbers[5] = len(note), end
        self.moved_bytes += end
        slot.give(_FULL)

    def close(self) -> None:
        self._ring.close()


class Receiver(Inbox):
    """The end that receives.

    Args:
        heads, check: as for `Sender`.
    """

    def __init__(self, heads: Tensor, check: Check) -> None:
        self._ring = _Ring(heads, check)
        self._seen = [0] * (len(heads) // _HEAD)
        self.moved_bytes = 0

    def receive(self, read: Callable[[bytes, Tensor], T]) -> T:
        index = self._ring.turn
        slot = self._ring.next(_FULL)
        pid, descriptor, nbytes, generation, note_bytes, end = slot.numbers[:6]
        if generation != self._seen[index]:
            self._seen[index] = generation
            slot.hold(SharedSegment.open(pid, descriptor, nbytes))
        (_, begin), _ = places([note_bytes, 0])
        result = read(bytes(slot.memory.memory[:note_bytes]), slot.content[begin:end])
        self.moved_bytes += end
        slot.give(_EMPTY)
        return result

    def close(self) -> None:
        self._ring.close()
