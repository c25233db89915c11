"""What workers and servers say to each other: a head of fixed form, then whole numbers."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Kind", "Message", "decode", "encode"]

_HEAD = struct.Struct("<BBHHHHqdd")
_VERSION = 2


class Kind(IntEnum):
    """What a message is about; the first half is asked by workers, the other answered by servers."""

    JOIN = 1
    PUSH = 2
    PULL = 3
    PUSH_PULL = 4
    ASK = 5
    HALT = 6
    ADVANCE = 7
    STATE = 8
    LOAD = 9
    SWAP = 10
    SETTLE = 11
    LEAVE = 12
    END = 13
    COMMIT = 14

    ANSWER = 64
    GRANT = 65
    FENCE = 66
    DONE = 67
    ERROR = 68


@dataclass(frozen=True, slots=True)
class Message:
    """One of them.

    Attributes:
        kind: what it is about.
        first: of the shards that it is about; their number is that of `numbers`.
        flag: a push: 1 if it is finite. An answer: the `Reason` of a refusal, 0 for none.
        lease: that a push is made from; -1 for none.
        weight, share: of a push, as the `Shard` knows them.
        steps: whose gradients a push is the sum of; each has that share.
        numbers: a push or pull: a version for each shard, `~version` where the push has no gradient for it. An answer:
            the versions. ADVANCE: rounds that worker 0 does alone. Others: see `Kind`.
    """

    kind: Kind
    first: int = 0
    flag: int = 0
    lease: int = -1
    weight: float = 0.0
    share: float = 0.0
    numbers: tuple[int, ...] = ()
    steps: int = 1


def encode(message: Message) -> bytes:
    """Returns a message as bytes."""
    count = len(message.numbers)
    head = _HEAD.pack(
        *(_VERSION, message.kind, message.first, count, message.flag, message.steps),
        *(message.lease, message.weight, message.share),
    )
    return head + array("q", message.numbers).tobytes()


def decode(data: bytes) -> Message:
    """Returns the message that bytes stand for.

    Raises:
        ValueError: they stand for none.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"a message of {len(data)} bytes is too short")
    version, kind, first, count, flag, steps, lease, weight, share = _HEAD.unpack_from(data)
    if version != _VERSION or len(data) != _HEAD.size + 8 * count:
        raise ValueError(f"no message of form {_VERSION}: {len(data)} bytes for {count} numbers of form {version}")
    numbers = array("q")
    numbers.frombytes(memoryview(data)[_HEAD.size :])
    return Message(Kind(kind), first, flag, lease, weight, share, tuple(numbers), steps)
