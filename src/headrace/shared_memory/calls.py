"""What a rank has called of the collectives of accelerators: in the control page, where the others read it."""

from __future__ import annotations

from ctypes import Array, Structure, c_char, c_int64

REMEMBERED = 32
"""Calls of a group that are remembered."""
GROUPS = 16
"""Groups of accelerators that a rank may be in."""
APART = 64
"""How far from each other calls are whose digests are remembered for longer."""
CHARACTERS = 160


class CollectiveCall(Structure):
    """A call: `number` counts those of its group from 1, and is 0 while it is written; `round` is the worker's.

    `digest` is one of all calls of the group up to this one: ranks that have called the same have the same.
    """

    number: int
    nbytes: int
    round: int
    digest: int
    name: bytes
    dtype: bytes
    _fields_ = [
        *((name, c_int64) for name in ("number", "nbytes", "round", "digest")),
        *(("name", c_char * 24), ("dtype", c_char * 16)),
    ]


class CallDigest(Structure):
    """The digest of a call: each `APART`th one is remembered for longer, for ranks that hear of each other late."""

    number: int
    digest: int
    _fields_ = [("number", c_int64), ("digest", c_int64)]


class GroupCalls(Structure):
    """The calls of a rank in one group: `key` is the group's, 0 for none, and `number` that of the last call."""

    key: int
    number: int
    calls: Array[CollectiveCall]
    digests: Array[CallDigest]
    _fields_ = [
        *(("key", c_int64), ("number", c_int64)),
        *(("calls", CollectiveCall * REMEMBERED), ("digests", CallDigest * REMEMBERED)),
    ]


class CallBoard(Structure):
    """The calls of a rank in all its groups, and what it does.

    `seeks` is 1 while it waits, or is waited for: then other hosts are told all that is remembered. `awaits` is
    1 + the rank that it waits for; `recorded` is 1 once it has written down what there is to know of a failed run;
    `crowded` is 1 once it has been in more groups at a time than are noted.
    """

    seeks: int
    awaits: int
    recorded: int
    crowded: int
    activity: bytes
    groups: Array[GroupCalls]
    _fields_ = [
        *((name, c_int64) for name in ("seeks", "awaits", "recorded", "crowded")),
        *(("activity", c_char * CHARACTERS), ("groups", GroupCalls * GROUPS)),
    ]
