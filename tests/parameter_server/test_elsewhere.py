"""Rounds of which another server says whose they are."""

from __future__ import annotations

from headrace.parameter_server.core.events import (
    Accumulate,
    Ack,
    ApplyStep,
    Join,
    Leave,
    Pull,
    Push,
    Reason,
    Refuse,
    Reply,
    RoundMembers,
)
from headrace.parameter_server.core.shard import Shard
from headrace.policies.staleness import DecidedElsewhere, Unbounded
from parameter_server.test_shard import told


def test_a_round_that_is_over_elsewhere_is_of_the_same_workers_here() -> None:
    shard = Shard(range(3), Unbounded(), DecidedElsewhere())
    assert told(shard, Push(1, 0, 9, 0), Pull(1)) == [Refuse(1, 9, Reason.LATE), Reply(1, 0)]
    assert told(shard, RoundMembers(5, ((0, 0), (2, 0))), Push(0, 0, 0, 0), Pull(1), Pull(0)) == [Accumulate(0)]
    again = Shard(range(3), Unbounded(), DecidedElsewhere())
    again.load(shard.state())
    for each in (shard, again):
        assert told(each, RoundMembers(5, ((0, 0), (2, 0))), Push(2, 0, 1, 0)) == [
            Accumulate(2), ApplyStep((0, 2), 2.0, 0), Ack(0, 0), Ack(2, 1), Reply(1, 1), Reply(0, 1),
        ]  # fmt: skip
        # A worker that is told of it when it is over goes on at once.
        assert told(each, RoundMembers(5, ((0, 0), (2, 0))), Pull(2)) == [Reply(2, 1)]
        assert each.last == RoundMembers(0, ((0, 0), (2, 0)))


def test_of_a_round_that_is_over_elsewhere_the_lost_are_not_awaited() -> None:
    shard = Shard(range(3), Unbounded(), DecidedElsewhere())
    told(shard, RoundMembers(5, ((0, 0), (1, 0))), Push(0, 0, 0, 0))
    assert told(shard, Leave(1)) == [ApplyStep((0,), 1.0, 0), Ack(0, 0)]
    assert told(shard, RoundMembers(6, ((1, 0), (2, 0))), Pull(0)) == [], "who is no member any more is not awaited"
    assert told(shard, Join(2), Pull(0)) == [], "who comes again over another link is"
    assert told(shard, Join(2, 1)) == [Reply(0, 2)], "who comes in its place is not"
    assert told(shard, RoundMembers(7, ((2, 0),)), Pull(2, 1)) == [Reply(2, 3)], "nor who has come already"
    told(shard, RoundMembers(8, ((0, 0), (2, 1))), Push(0, 0, 7, 3))
    late = [Refuse(2, 8, Reason.LATE), ApplyStep((0,), 1.0, 0), Ack(0, 7)]
    assert told(shard, Push(2, 1, 8, 2)) == late, "nor who has older parameters"
