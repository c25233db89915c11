"""Rounds of all members, rounds that are ended early, and the last rounds before a sync point."""

from __future__ import annotations

import pytest

from headrace.parameter_server.core.events import (
    Accumulate,
    Ack,
    ApplyStep,
    Close,
    Event,
    Join,
    LeasesAhead,
    Leave,
    Pull,
    Push,
    Reason,
    Refuse,
    Renew,
    Reply,
    Settle,
)
from headrace.parameter_server.core.shard import Shard
from headrace.policies.staleness import AllMembers, FirstPushes, Unbounded
from parameter_server.test_shard import told, two


def test_a_round_of_all_waits_for_the_present_workers() -> None:
    shard = two(combination=AllMembers())
    told(shard, Join(2), Push(0, 0, 0, 0), Push(1, 0, 1, 0))
    assert told(shard, Push(2, 0, 2, 0))[1:2] == [ApplyStep((0, 1, 2), 3.0, 0)]
    told(shard, Push(0, 0, 3, 1), Push(2, 0, 4, 1))
    assert told(shard, Leave(1))[0] == ApplyStep((0, 2), 2.0, 0)


def test_a_round_that_was_waited_for_long_enough_ends_with_the_present_workers() -> None:
    shard = Shard(range(3), Unbounded(), AllMembers())
    told(shard, Push(0, 0, 0, 0), Push(1, 0, 1, 0), Pull(0))
    assert told(shard, Close(2)) == [], "it does not wait"
    assert told(shard, Close(1)) == [ApplyStep((0, 1), 2.0, 0), Ack(0, 0), Ack(1, 1), Reply(0, 1)]
    assert told(shard, Push(2, 0, 2, 0)) == [Refuse(2, 2, Reason.LATE)]
    assert told(shard, Push(2, 0, 2, 1), Close(1)) == [Accumulate(2)], "another round"


@pytest.mark.parametrize("comes", [Push(2, 0, 2, 0), Join(2, 1)], ids=["late", "anew"])
def test_who_has_kept_others_waiting_is_not_waited_for_before_it_comes(comes: Event) -> None:
    shard = Shard(range(3), Unbounded(), AllMembers())
    told(shard, Push(0, 0, 0, 0), Push(1, 0, 1, 0), Close(0))
    other = Shard(range(3), Unbounded(), AllMembers())
    other.load(shard.state())
    for each in (shard, other):
        assert told(each, Push(0, 0, 3, 1), Push(1, 0, 4, 1))[2:3] == [ApplyStep((0, 1), 2.0, 0)]
        told(each, comes)
        assert told(each, Push(0, 0, 5, 2), Push(1, 0, 6, 2)) == [Accumulate(0), Accumulate(1)]


def test_the_last_round_in_front_of_a_fence_may_be_short() -> None:
    shard = two(combination=FirstPushes(2))
    told(shard, LeasesAhead(3), Push(0, 0, 0, 0), Push(1, 0, 1, 0))
    assert told(shard, Push(1, 0, 2, 1)) == [Accumulate(1), ApplyStep((1,), 1.0, 0), Ack(1, 2)]
    told(shard, Settle(), Push(0, 0, 3, 2))
    assert told(shard, LeasesAhead(1)) == [ApplyStep((0,), 1.0, 0), Ack(0, 3)]


def test_a_pull_may_ask_for_a_version_that_is_still_to_come() -> None:
    shard = two()
    assert told(shard, Pull(0, least=1)) == []
    assert told(shard, Push(1, 0, 0, 0)) == [ApplyStep((1,), 1.0, 0), Ack(1, 0), Reply(0, 1)]
    assert told(shard, Pull(0, least=2), Renew()) == [Reply(0, 2)]
    assert told(shard, Settle(version=9), Settle(version=5), Pull(0)) == [Reply(0, 9)]
