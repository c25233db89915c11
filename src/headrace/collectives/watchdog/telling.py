"""What processes of other hosts are told of a rank's calls.

Always: the number and the last call of each group, and the last digest that is remembered for longer. While a rank
waits, or is waited for, also all calls that it remembers, each time these have changed.
"""

from __future__ import annotations

from ctypes import Structure, c_char, c_int64, sizeof

from headrace.collectives.watchdog.boards import LEFT, call_of, digest_of, group_of, joined, take
from headrace.shared_memory.calls import (
    APART,
    CHARACTERS,
    GROUPS,
    REMEMBERED,
    CallBoard,
    CallDigest,
    CollectiveCall,
    GroupCalls,
)

_SHORT = ("seeks", "awaits", "recorded", "crowded")


class _Told(Structure):
    """Of a board, before its groups."""

    activity: bytes
    _fields_ = [*((name, c_int64) for name in _SHORT), ("activity", c_char * CHARACTERS)]


class _ToldGroup(Structure):
    key: int
    number: int
    digest: CallDigest
    last: CollectiveCall
    _fields_ = [("key", c_int64), ("number", c_int64), ("digest", CallDigest), ("last", CollectiveCall)]


def summary(board: CallBoard) -> bytes:
    """Returns what is always told; b"" where the rank has been in no group."""
    used = [place for place, group in enumerate(board.groups, 1) if group.key]
    if not used:
        return b""
    told = _Told(*(getattr(board, name) for name in _SHORT), board.activity)
    return bytes(told) + b"".join(bytes(_summary_of(group)) for group in board.groups[: used[-1]])


def _summary_of(group: GroupCalls) -> _ToldGroup:
    told = _ToldGroup(group.key, group.number)
    if told.number != LEFT:
        told.last = call_of(group, told.number) or CollectiveCall()
        told.digest = digest_of(group, told.number // APART * APART)
    return told


def note_summary(board: CallBoard, told: bytes) -> None:
    """Writes to the copy of another rank's board what that has told; a ValueError where it is none."""
    places = (len(told) - sizeof(_Told)) // sizeof(_ToldGroup)
    if not told:
        return
    if places > GROUPS or len(told) != sizeof(_Told) + places * sizeof(_ToldGroup):
        raise ValueError(f"{len(told):,} bytes of calls, which are those of no number of groups")
    short = _Told.from_buffer_copy(told)
    for name in (*_SHORT, "activity"):
        setattr(board, name, getattr(short, name))
    for group, each in zip(board.groups, (_ToldGroup * places).from_buffer_copy(told, sizeof(_Told)), strict=False):
        if group.key != each.key:
            take(group, each.key)
        if each.number != LEFT:
            group.calls[each.last.number % REMEMBERED] = each.last
            group.digests[each.digest.number // APART % REMEMBERED] = each.digest
        # Last, because it says that the rest is there.
        group.number = each.number


def remembered(board: CallBoard) -> bytes:
    """Returns all calls that are remembered of the groups that a rank is in."""
    return b"".join(bytes(group) for group in joined(board))


def note_remembered(board: CallBoard, told: bytes) -> None:
    """Writes them to the copy of another rank's board; a ValueError where they are none."""
    for each in (GroupCalls * (len(told) // sizeof(GroupCalls))).from_buffer_copy(told):
        group = group_of(board, each.key)
        # An older one than the summary tells is of no use, and each call says its number.
        if group and group.number != LEFT:
            group.calls = each.calls
