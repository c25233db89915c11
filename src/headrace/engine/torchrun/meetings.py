"""Barriers of members that may be lost: a store decides whether all who live have come.

A meeting is over when each of its members has come or was lost. That is decided once, for all of them: an arrival
counts only if it was there before its member was declared lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Caller = TypeVar("_Caller")

_CAME, _LOST = b"+", b""


@dataclass
class _Meeting(Generic[_Caller]):
    members: Sequence[bytes]
    came: dict[bytes, bytes] = field(default_factory=dict)
    callers: list[_Caller] = field(default_factory=list)


class Meetings(Generic[_Caller]):
    """All meetings that are not over, and the members that are lost, by name."""

    def __init__(self) -> None:
        self._open: dict[bytes, _Meeting[_Caller]] = {}
        self._lost: set[bytes] = set()

    def arrive(
        self, caller: _Caller, key: bytes, name: bytes, value: bytes, members: Sequence[bytes]
    ) -> Iterable[tuple[_Caller, list[bytes]]]:
        """Notes that a member has come to a meeting, with a value; returns who is answered now, and how.

        The answer has an entry for each member: see `value_of`. A member that is lost gets an empty one.
        Raises ValueError if the member is none of the meeting, or others have come to one with other members.
        """
        if name in self._lost:
            return [(caller, [])]
        meeting = self._open.setdefault(key, _Meeting(members))
        if name not in members or list(members) != list(meeting.members):
            raise ValueError(f"{name!r} comes to a meeting of {members!r}, which is of {meeting.members!r}")
        meeting.came[name] = _CAME + value
        meeting.callers.append(caller)
        return self._end([key])

    def lose(self, name: bytes) -> Iterable[tuple[_Caller, list[bytes]]]:
        """Declares a member lost; returns who is answered now, and how."""
        self._lost.add(name)
        return self._end(list(self._open))

    def _end(self, keys: Iterable[bytes]) -> Iterable[tuple[_Caller, list[bytes]]]:
        answers = []
        for key in keys:
            meeting = self._open[key]
            if all(name in meeting.came or name in self._lost for name in meeting.members):
                del self._open[key]
                told = [meeting.came.get(name, _LOST) for name in meeting.members]
                answers += [(caller, told) for caller in meeting.callers]
        return answers


def value_of(told: bytes) -> bytes | None:
    """Returns the value of a member, from its entry of an answer; None if it was lost before it came."""
    return told.removeprefix(_CAME) if told else None
