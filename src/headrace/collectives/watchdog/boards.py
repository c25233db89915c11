"""Writes and reads what ranks have called, in memory that others read and write at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import memset, sizeof

from headrace.shared_memory import futex
from headrace.shared_memory.calls import APART, REMEMBERED, CallBoard, CallDigest, CollectiveCall, GroupCalls

LEFT = 2**62
"""The number of calls of a rank that has left a group: no rank waits for it."""


def take(group: GroupCalls, key: int) -> None:
    """Takes a place for a group without calls."""
    group.key = 0
    futex.fence()
    memset(group.calls, 0, sizeof(group.calls) + sizeof(group.digests))
    group.number = 0
    futex.fence()
    group.key = key


def call_of(group: GroupCalls, number: int) -> CollectiveCall | None:
    """Returns a copy of a call; None if it is not remembered, or just written."""
    place = group.calls[number % REMEMBERED]
    if number <= 0 or place.number != number:
        return None
    copy = CollectiveCall.from_buffer_copy(place)
    futex.fence()
    return copy if place.number == number == copy.number else None


def digest_of(group: GroupCalls, number: int) -> CallDigest:
    """Returns where the digest of a call is that is remembered for longer; others have been there before it."""
    return group.digests[number // APART % REMEMBERED]


def calls_of(group: GroupCalls) -> list[CollectiveCall]:
    """Returns the calls that are remembered, in order."""
    numbers = range(group.number - REMEMBERED + 1, group.number + 1)
    return [call for number in numbers if (call := call_of(group, number))]


def group_of(board: CallBoard, key: int) -> GroupCalls | None:
    """Returns the calls of a rank in a group; None if it has not joined it."""
    return next((group for group in board.groups if group.key == key), None)


def joined(board: CallBoard) -> Iterator[GroupCalls]:
    """Yields the groups that a rank is in."""
    return (group for group in board.groups if group.key and group.number != LEFT)


def said(call: CollectiveCall | None) -> str:
    """Returns a call as messages name it."""
    if call is None:
        return "no call"
    dtype = call.dtype and f" of {call.dtype.decode(errors='replace')}"
    size = f", {call.nbytes:,} bytes{dtype or ''}" * (call.nbytes > 0)
    return f"{call.name.decode(errors='replace')} (number {call.number}, round {call.round}{size})"


def last_call(board: CallBoard) -> str:
    """Returns the last call of a rank."""
    calls = [call for group in joined(board) if (call := call_of(group, group.number))]
    return said(max(calls, key=lambda call: call.round, default=None))


def missed(boards: Sequence[CallBoard], rank: int) -> str:
    """Returns to which call of others a rank has not come, its last one, and what it did; "" where it has made none."""
    board = boards[rank]
    waits: dict[int, CollectiveCall] = {}
    for group in joined(board):
        for other, calls in ((other, group_of(each, group.key)) for other, each in enumerate(boards) if other != rank):
            if calls and calls.number != LEFT and (call := call_of(calls, group.number + 1)):
                waits[other] = call
    if not waits and not any(group.number for group in joined(board)):
        return ""
    where = listed([f"rank {other}" for other in waits]) + (" waits" if len(waits) == 1 else " wait")
    came = f"it has not come to {said(next(iter(waits.values())))}, where {where}; " if waits else ""
    doing = board.activity.decode(errors="replace")
    return f"; {came}rank {rank}: {last_call(board)}{doing and f', {doing}'}"


def listed(names: Sequence[str]) -> str:
    """Returns "a, b and c"."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
