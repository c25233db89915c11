"""The seam of every transport between workers and servers: a client's end, a server's end, and what both must share.

A transport carries three kinds of data: messages of a few hundred bytes; slots, whose place and length both ends know
beforehand (gradients to the server, parameters to the client); and blobs, rare and of any length. The messages of one
connection arrive in the order in which they were sent.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from headrace.shared_memory.layout import LINE, places
from headrace.shared_memory.segment import SharedSegment

PROTOCOL = 1
"""Version of the protocol; raised with every change of what is sent over a connection."""

Blob = bytes | bytearray | memoryview | SharedSegment
"""What is sent with a message. On one host a segment is shared, not copied, and must not change."""

Region = TypeVar("Region", Tensor, memoryview)

LARGEST_MESSAGE = 60_000
"""Bytes; anything longer is sent as a blob."""

_BLOB_FACTOR, _LEAST_BLOB_BYTES, _UNREAD_BYTES = 16, 1 << 26, 1 << 26

LARGEST_ANSWER = 1 << 40
"""Bytes of the longest blob from a server: its whole state, which fills its backup, may be longer than 4 GiB."""
_GREETING = struct.Struct("<8sI")
"""The beginning of a hello, in every version of the protocol."""

_HELLO = struct.Struct("<6Q")
_MAGIC = b"headrace"
_NOTHING = memoryview(b"")


@dataclass(frozen=True)
class ReceivedMessage:
    """A message that a server has received from connection `peer`, a number that one transport never uses twice.

    `memory` is what the client writes its pushes to; None if they are sent.
    """

    peer: int
    message: bytes
    blob: memoryview = _NOTHING
    memory: SharedSegment | None = field(default=None, compare=False)


class Slots:
    """Places of given lengths in one region of memory, each on a cache line of its own; all numbers are bytes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self.starts, self.nbytes = places(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def of(self, region: Region, slot: int) -> Region:
        """Returns a slot of a `(nbytes,)` uint8 region."""
        return region[self.starts[slot] : self.starts[slot] + self.lengths[slot]]

    def views(self, region: Tensor) -> list[Tensor]:
        """Returns all slots of a region."""
        return [self.of(region, slot) for slot in range(len(self))]

    def joined(self, region: Region, slots: range) -> Region | None:
        """Returns slots that follow each other as one place; None if there is a gap between two."""
        if any(self.lengths[slot] % LINE for slot in slots[:-1]):
            return None
        return region[self.starts[slots[0]] : self.starts[slots[-1]] + self.lengths[slots[-1]]]

    def sum(self, slots: Sequence[int]) -> int:
        """Returns the length of some slots together."""
        return sum(self.lengths[slot] for slot in slots)


@dataclass(frozen=True)
class TransportLayout:
    """The slots that both ends of a connection must have alike.

    `pushes` are those of a client's gradients, none for a client that only pulls; `replies` those of encoded
    parameters, None if a client pulls the parameters as they are. `rows_bytes` is the length of the longest blob with
    rows of sparse tables.
    """

    parameters: Slots
    pushes: Slots
    replies: Slots | None = None
    rows_bytes: int = 0

    @property
    def pulled(self) -> Slots:
        """The slots that the server sends to a client."""
        return self.replies or self.parameters

    def hello(self) -> bytes:
        """Returns a client's first message, which describes its layout."""
        every = (self.parameters, self.pushes, self.replies or Slots(()))
        numbers = [number for slots in every for number in (len(slots), sum(slots.lengths))]
        return _GREETING.pack(_MAGIC, PROTOCOL) + _HELLO.pack(*numbers)

    @property
    def blob_bytes(self) -> int:
        """The longest blob that a client may send: a shard's state of any optimizer, rows, or a few messages."""
        return _BLOB_FACTOR * max(self.parameters.lengths, default=0) + _LEAST_BLOB_BYTES + self.rows_bytes

    @property
    def unread_bytes(self) -> int:
        """Messages and blobs that a client may leave unread, which is told those of its next step ahead, and again."""
        return _UNREAD_BYTES + 2 * self.rows_bytes

    def require_short(self, message: bytes, blob: bytes) -> None:
        """Raises ValueError if a client sends what would end its connection, as often as it is sent."""
        if len(message) > LARGEST_MESSAGE or len(blob) > self.blob_bytes:
            raise ValueError(
                f"a message of {len(message):,} bytes with a blob of {len(blob):,}; a server takes at most "
                f"{LARGEST_MESSAGE:,} and {self.blob_bytes:,}"
            )

    def match(self, hello: bytes) -> TransportLayout:
        """Returns the layout of a client's hello: this one, perhaps without pushes; raises ValueError for another."""
        if len(hello) < _GREETING.size or not hello.startswith(_MAGIC):
            raise ValueError("this is a parameter server of headrace, and the client is not a worker of headrace")
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
        ours, theirs = (_HELLO.unpack_from(message, _GREETING.size) for message in (self.hello(), hello))
        raise ValueError(
            f"the server has {_describe(ours)}, the worker {_describe(theirs)}; build the same model on both, with the "
            "same sharding and compression"
        )


def _describe(numbers: Sequence[int]) -> str:
    shards, nbytes, _, pushed, _, replied = numbers
    return f"{shards} shards of {nbytes:,} bytes, pushed in {pushed:,} and pulled in {replied or nbytes:,}"


class ServerTransport(ABC):
    """A server's end of all its connections; `moved_bytes` is the payload in both directions.

    `trusts_clients` says whether clients have checked that what they push is finite. On one host clients are this
    library's, and what they push remains their own memory, so that checking it in the server proves nothing.
    """

    trusts_clients: bool = False
    address: str
    moved_bytes: int

    @abstractmethod
    def parameters(self, slot: int) -> Tensor:
        """Returns the server's own copy of a shard's parameters, `(bytes,)` uint8, which clients read."""

    @abstractmethod
    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        """Returns a context in which these parameters may be written, while clients do not read them."""

    @abstractmethod
    def set_version(self, slot: int, version: int) -> None:
        """Publishes the version of a shard's parameters; inside `writing` if they have changed."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        """Returns all messages that have arrived; waits for one, but not longer than `timeout_s`."""

    @abstractmethod
    def pushed(self, peer: int, slot: int) -> Tensor:
        """Returns what a client has pushed, `(bytes,)` uint8, until it is released; ValueError if it has not."""

    @abstractmethod
    def release(self, peer: int, slots: Sequence[int]) -> None:
        """Lets the client's next push overwrite what it has pushed into these slots."""

    @abstractmethod
    def reply_slot(self, peer: int, slot: int) -> Tensor:
        """Returns where to write encoded parameters for a client, `(bytes,)` uint8."""

    @abstractmethod
    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        """Sends a message, with the parameters in `slots`; does nothing if the connection has ended.

        `limited` ends a connection whose client leaves too much unread.
        """

    @abstractmethod
    def drop(self, peer: int) -> None:
        """Ends one connection."""

    @abstractmethod
    def close(self) -> None:
        """Ends all connections, and frees their memory."""


class ClientTransport(ABC):
    """A worker's end; `moved_bytes` is the payload in both directions.

    `window` says how many pushes may be unanswered, because the server has to keep them; None for any number.
    """

    window: int | None = None
    moved_bytes: int

    @abstractmethod
    def push_slot(self, slot: int) -> Tensor:
        """Returns where to write a shard's gradient before it is sent, `(bytes,)` uint8; kept between pushes."""

    def joined_push_slots(self, slots: range) -> Tensor | None:
        """Returns push slots that follow each other as one place, `(bytes,)` uint8, which is read where it is.

        None if they are not side by side, or what is pushed is sent.
        """
        return None

    @abstractmethod
    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        """Sends a message, with the content of the push slots `slots`."""

    @abstractmethod
    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        """Returns the next message and its blob, None after `timeout_s`; raises ConnectionError after the end."""

    @abstractmethod
    def fetch(self, slot: int, into: Tensor) -> int:
        """Copies a shard's newest parameters into `(bytes,)` uint8, and returns their version."""

    def current_version(self, slot: int) -> int | None:
        """Returns the server's present version of a shard; None if only the server knows it."""
        return None

    @abstractmethod
    def reply_slot(self, slot: int) -> Tensor:
        """Returns the encoded parameters that the server has sent, `(bytes,)` uint8."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connection."""
