"""Both ends of the way between a worker and a server: the seam that every transport implements.

A `ClientTransport` is a worker's end, a `ServerTransport` the server's, for any number of clients. It carries three
kinds of data: messages of a few hundred bytes; slots, whose place and length both ends know beforehand (gradients one
way, parameters the other); and blobs, rare and of any length. Messages of one link arrive in the order in which
they were sent.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from torch import Tensor

from headrace.shared_memory.segment import SharedSegment

PROTOCOL = 1
"""Which way of speaking this is; to be raised with every change of what goes over a link."""

Blob = bytes | bytearray | memoryview | SharedSegment
"""What is sent along with a message; on one host a segment is shared, not copied, and must stay as it is."""

LARGEST_MESSAGE = 60_000
"""Bytes; whatever is longer is a blob."""

_ALIGN = 64
_BLOBS = 16, 1 << 26
_GREETING = struct.Struct("<8sI")
"""Whatever else changes, a hello begins with this."""

_HELLO = struct.Struct("<6Q")
_MAGIC = b"headrace"
_NOTHING = memoryview(b"")


@dataclass(frozen=True)
class ReceivedMessage:
    """What a port has received.

    Attributes:
        peer: number of the link, never used twice by one port.
        message: empty if the link is gone, however it went.
        blob: what came along; empty for most.
        memory: in which the link pushes; None if its pushes are sent.
    """

    peer: int
    message: bytes
    blob: memoryview = _NOTHING
    memory: SharedSegment | None = field(default=None, compare=False)


class Slots:
    """Places of pieces of memory that lie side by side, each on a cache line of its own.

    Args:
        lengths: bytes of each.

    Attributes:
        starts, lengths: by slot, bytes.
        nbytes: of all together.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        position, starts = 0, []
        for length in lengths:
            starts.append(position)
            position += -(-length // _ALIGN) * _ALIGN
        self.starts = tuple(starts)
        self.nbytes = position

    def __len__(self) -> int:
        return len(self.lengths)

    def of(self, region: Tensor, slot: int) -> Tensor:
        """Returns a slot of a `(nbytes,)` uint8 region."""
        return region[self.starts[slot] : self.starts[slot] + self.lengths[slot]]

    def views(self, region: Tensor) -> list[Tensor]:
        """Returns all slots of a region."""
        return [self.of(region, slot) for slot in range(len(self))]


@dataclass(frozen=True)
class TransportLayout:
    """What both ends of a link must have alike.

    Attributes:
        parameters: places of the shards' parameters.
        pushes: places of what a link pushes; none for a link that only pulls.
        replies: places of what a link pulls in another form; None if it pulls parameters as they are.
    """

    parameters: Slots
    pushes: Slots
    replies: Slots | None = None

    @property
    def pulled(self) -> Slots:
        """What goes from the port to a link."""
        return self.replies or self.parameters

    def hello(self) -> bytes:
        """Returns what a link tells the port of it."""
        every = (self.parameters, self.pushes, self.replies or Slots(()))
        numbers = [number for slots in every for number in (len(slots), sum(slots.lengths))]
        return _GREETING.pack(_MAGIC, PROTOCOL) + _HELLO.pack(*numbers)

    @property
    def blob_bytes(self) -> int:
        """The longest blob that a link may send: a shard's state, of any optimizer, or the words of a few messages."""
        factor, least = _BLOBS
        return factor * max(self.parameters.lengths, default=0) + least

    def match(self, hello: bytes) -> TransportLayout:
        """Returns the layout of a link that says this: the same, perhaps without pushes.

        Raises:
            ValueError: it is another one.
        """
        if len(hello) < _GREETING.size or not hello.startswith(_MAGIC):
            raise ValueError("this is a parameter server of headrace, and whoever calls is no worker of it")
        _, protocol = _GREETING.unpack_from(hello)
        if protocol != PROTOCOL:
            raise ValueError(
                f"the server speaks protocol {PROTOCOL} and the worker {protocol}; install the same headrace on both"
            )
        if len(hello) != _GREETING.size + _HELLO.size:
            raise ValueError(f"a hello of {len(hello)} bytes is none of protocol {PROTOCOL}")
        for layout in (self, replace(self, pushes=Slots(()))):
            if hello == layout.hello():
                return layout
        own, theirs = (_HELLO.unpack_from(each, _GREETING.size) for each in (self.hello(), hello))
        raise ValueError(
            f"the server has {_words(own)}, the worker {_words(theirs)}; build the same model on both, with the "
            "same sharding and compression"
        )


def _words(numbers: Sequence[int]) -> str:
    shards, nbytes, _, pushed, _, replied = numbers
    return f"{shards} shards of {nbytes:,} bytes, pushed in {pushed:,} and pulled in {replied or nbytes:,}"


class ServerTransport(ABC):
    """A server's end of all its links.

    Attributes:
        vouched: whether links have looked at what they push. On one host they are this library's, and what they push
            remains their own memory, which they could still change after any look of the server's.
        address: where links find it.
        moved_bytes: payload that has gone through it, both ways.
    """

    trusts_clients: bool = False
    address: str
    moved_bytes: int

    @abstractmethod
    def parameters(self, slot: int) -> Tensor:
        """Returns the place of a shard's parameters, `(bytes,)` uint8: the server's own copy, which links read."""

    @abstractmethod
    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        """Holds off readers of these parameters for as long as they are written to."""

    @abstractmethod
    def set_version(self, slot: int, version: int) -> None:
        """Says which version a shard's parameters are; inside `changing` where they have changed."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        """Returns all mail that is there; waits for some, but not longer than `timeout_s`."""

    @abstractmethod
    def pushed(self, peer: int, slot: int) -> Tensor:
        """Returns what a link has pushed into a slot, `(bytes,)` uint8; it lies there until it is released.

        Raises:
            ValueError: it has not pushed.
        """

    @abstractmethod
    def release(self, peer: int, slots: Sequence[int]) -> None:
        """Says that what a link has pushed into these slots is not needed any more; the next push may be put there."""

    @abstractmethod
    def reply_slot(self, peer: int, slot: int) -> Tensor:
        """Returns where to put what a link pulls in another form than the server's own, `(bytes,)` uint8."""

    @abstractmethod
    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        """Sends a message, with the parameters in `slots`. A link that is gone takes nothing and hurts nobody.

        Args:
            peer: the link.
            message, slots, blob: what.
            limited: end the link if it leaves too much unread.
        """

    @abstractmethod
    def drop(self, peer: int) -> None:
        """Ends one link."""

    @abstractmethod
    def close(self) -> None:
        """Ends all links; frees what they shared."""


class ClientTransport(ABC):
    """A worker's end.

    Attributes:
        window: how many pushes may be on their way, because the port has to keep them; None for any number.
        moved_bytes: payload that has gone through it, both ways.
    """

    window: int | None = None
    moved_bytes: int

    @abstractmethod
    def push_slot(self, slot: int) -> Tensor:
        """Returns where to put a shard's gradient before it is sent, `(bytes,)` uint8; it is kept between pushes."""

    @abstractmethod
    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        """Sends a message, with what lies in the push slots `slots`."""

    @abstractmethod
    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        """Returns the next message and its blob; None if none came within `timeout_s`.

        Raises:
            ConnectionError: the port is gone.
        """

    @abstractmethod
    def fetch(self, slot: int, into: Tensor) -> int:
        """Copies a shard's newest parameters that the port has sent, or shows; returns their version.

        Args:
            slot: which shard.
            into: `(bytes,)` uint8.
        """

    def current_version(self, slot: int) -> int | None:
        """Returns which version a shard's parameters are now; None where that is not to be seen from here."""
        return None

    @abstractmethod
    def reply_slot(self, slot: int) -> Tensor:
        """Returns what the port has put into a reply slot, `(bytes,)` uint8."""

    @abstractmethod
    def close(self) -> None:
        """Ends the link."""
