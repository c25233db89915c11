"""Writes and reads what ranks have called, in memory that others read and write at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import memset, sizeof

from headrace.shared_memory import futex
from headrace.shared_memory.calls import REMEMBERED, CallBoard, CollectiveCall, GroupCalls

LEFT = 2**62
"""The number of calls of a rank that has left a group: no rank waits for it."""


def take(group: GroupCalls, key: int) -> None:
    """Takes a place for a group without calls."""
    group.key = 0
    futex.fence()
    memset(group.calls, 0, sizeof(group.calls))
    group.number = 0
    futex.fence()
    group.key = key


def call_of(group: GroupCalls, number: int) -> CollectiveCall | None:
    """Returns a copy of a call; None if it is not remembered, or just written."""
    place = group.calls[number % REMEMBERED]
    copy = CollectiveCall.from_buffer_copy(place)
    futex.fence()
    return copy if number > 0 and place.number == number == copy.number else None


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
    size = f", {call.nbytes:,} bytes" * (call.nbytes > 0)
    return f"{call.name.decode(errors='replace')} (number {call.number}, round {call.round}{size})"


def last_call(board: CallBoard) -> str:
    """Returns the last call of a rank."""
    calls = [call for group in joined(board) if (call := call_of(group, group.number))]
    return said(max(calls, key=lambda call: call.round, default=None))
