"""Messages between workers and servers: a head of fixed layout, then whole numbers."""

from __future__ import annotations

import functools
import struct
from enum import IntEnum
from typing import NamedTuple

_HEAD = struct.Struct("<BBHHHHqddQ")
_VERSION = 3
_MOST = (1 << 16) - 1
_LAST_LEASE = 1 << 48
MOST_WEIGHT = 1e15
"""More than any batch weighs: a sum of them remains a number."""
_MOST_SHARE = 1e3
"""More than any push stands for."""


class Kind(IntEnum):
    """What a message is about; workers ask the first half, servers answer with the other."""

    JOIN = 1
    PUSH = 2
    PULL = 3
    PUSH_PULL = 4
    ASK = 5
    HALT = 6
    ADVANCE = 7
    STATE = 8
    LOAD = 9
    AVERAGE = 10
    SETTLE = 11
    LEAVE = 12
    END = 13
    COMMIT = 14
    ALIVE = 15
    BEGIN = 16
    REST = 17
    CLOSE = 18
    ROUND_MEMBERS = 19
    FOLLOW = 32
    HELD = 33

    ANSWER = 64
    GRANT = 65
    SYNC_POINT = 66
    DONE = 67
    ERROR = 68
    OPEN = 69
    FILL = 96
    MEMORY = 97
    ENTRY = 98


class Message(NamedTuple):
    """One message.

    Attributes:
        first: of the shards that it is about; their number is that of `numbers`.
        flag: of a push, 1 if it is finite. Of an answer, the `Reason` of a refusal, or 0. Of LEAVE, 1 for this client
            alone, 0 for its worker.
        lease: of a push; -1 for none.
        weight, share: of a push, see `Push`. Of an answer, the weight is the squared distance of the push from the mean
            of its round, if servers measure it.
        numbers: of a push or pull, a version for each shard, `~version` if the push has no gradient for it. Of an
            answer, the versions. Of ADVANCE, see `ServerDataLeases`. Of ROUND_MEMBERS, a round and its workers, or none
            to ask for them. Of JOIN, worker, incarnation, session. Of OPEN, the requests that are not answered yet. Of
            ERROR with `flag`, worker and incarnation of the process that has replaced this one.
        steps: how many gradients a push is the sum of; each has that share.
        number: counted by the client, from 1; an answer repeats it. 0 if the message is not remembered.
    """

    kind: Kind
    first: int = 0
    flag: int = 0
    lease: int = -1
    weight: float = 0.0
    share: float = 0.0
    numbers: tuple[int, ...] = ()
    steps: int = 1
    number: int = 0

    @property
    def pushed(self) -> list[int]:
        """The shards whose gradients are sent with it: those that have one, if all are finite and count."""
        if self.kind not in (Kind.PUSH, Kind.PUSH_PULL) or not self.weight or not self.flag:
            return []
        return [shard for shard, version in enumerate(self.numbers, self.first) if version >= 0]


def encode(message: Message) -> bytes:
    """Returns a message as bytes."""
    kind, first, flag, lease, weight, share, numbers, steps, number = message
    count = len(numbers)
    return _struct(count).pack(_VERSION, kind, first, count, flag, steps, lease, weight, share, number, *numbers)


def decode(data: bytes) -> Message:
    """Returns the message of some bytes.

    Raises:
        ValueError: they are not a message.
    """
    count, rest = divmod(len(data) - _HEAD.size, 8)
    if count < 0 or rest or count > _MOST:
        raise ValueError(f"a message of {len(data)} bytes is none of form {_VERSION}")
    version, kind, first, told, flag, steps, lease, weight, share, number, *numbers = _struct(count).unpack(data)
    if version != _VERSION or told != count:
        raise ValueError(f"no message of form {_VERSION}: {len(data)} bytes for {told} numbers of form {version}")
    if not -1 <= lease <= _LAST_LEASE:
        raise ValueError(f"a message of lease {lease}; leases are counted from 0 to {_LAST_LEASE:,}")
    # NaN is in no range.
    if not (0 <= weight <= MOST_WEIGHT and 0 <= share <= _MOST_SHARE):
        raise ValueError(
            f"a message of weight {weight:g} and share {share:g}; at most {MOST_WEIGHT:g} and {_MOST_SHARE:g} are sent"
        )
    return Message(Kind(kind), first, flag, lease, weight, share, tuple(numbers), steps, number)


@functools.lru_cache(maxsize=256)
def _struct(count: int) -> struct.Struct:
    return struct.Struct(f"{_HEAD.format}{count}q")
