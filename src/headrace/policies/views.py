"""Views: the members of a run whose workers may be lost, between two changes, and how one follows from another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

Member = tuple[int, int]
"""Rank in the run, and which of its processes: 0 for the first."""


@dataclass(frozen=True)
class MemberView:
    """The members between two changes.

    Attributes:
        done: steps that are committed when it begins.
        fresh: the members that do not have the state yet; the first of the others gives it to them.
        left: those that were asked to leave, in this view or in an earlier one.
    """

    number: int
    members: tuple[Member, ...]
    done: int = 0
    fresh: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()


def may_go_on(members: Collection[Member], present: Collection[Member]) -> bool:
    """Tells whether those members who are present go on: more than half, or just half with the lowest rank.

    Of two disjoint sets at most one does.

    >>> may_go_on([(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 0), (3, 0)])
    True
    >>> may_go_on([(0, 0), (1, 0), (2, 0), (3, 0)], [(1, 0), (2, 0)])
    False
    """
    count = len(set(members) & set(present))
    return 2 * count > len(members) or (2 * count == len(members) and min(members) in present)


@dataclass(frozen=True)
class MemberState:
    """How far a member is: steps that it has committed, -1 without the state; and whether it holds the next one."""

    done: int
    holds: bool


def next_view(
    base: MemberView,
    states: Mapping[Member, MemberState],
    joining: Collection[Member] = (),
    leaving: Collection[Member] = (),
) -> MemberView | None:
    """Returns the view after `base`, of the members that have answered and do not leave, and those that join.

    None if no member that has answered has the state. If only such have it that are to leave, they stay.
    """
    able = {member: state for member, state in states.items() if state.done >= 0}
    if not able:
        return None
    done = max(state.done for state in able.values())
    # A member may have committed it, and be gone.
    if len(able) == len(states) and all(state == MemberState(done, True) for state in able.values()):
        done += 1
    gone = set(leaving) if able.keys() - set(leaving) else set()
    present = [member for member in base.members if member in states and member not in gone]
    fresh = [*(member for member in present if member not in able), *sorted(joining)]
    stays = [member for member in present if member in able]
    left = (*base.left, *(member for member in base.members if member in gone))
    return MemberView(base.number + 1, (*stays, *fresh), done, tuple(fresh), left)
