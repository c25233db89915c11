"""Staleness policies: what they say, and bugs that histories of shards under them must find."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policies import staleness as module
from headrace.policies.staleness import Bounded, EveryPush, FirstPushes, Unbounded
from parameter_server.virtual import Machines
from parameter_server.worlds import is_found, mutated

CLOCKS = st.integers(0, 100)


@given(CLOCKS, CLOCKS)
def test_anytime_admits_everybody(clock: int, slowest: int) -> None:
    assert Unbounded().admits(clock, slowest)


@given(CLOCKS, CLOCKS, st.integers(0, 10))
def test_within_admits_up_to_the_bound_and_no_further(slowest: int, ahead: int, bound: int) -> None:
    assert Bounded(bound).admits(slowest + ahead, slowest) is (ahead <= bound)
    assert Bounded(bound).admits(slowest + bound, slowest)
    assert not Bounded(bound).admits(slowest + bound + 1, slowest)


@given(CLOCKS, st.integers(0, 10))
def test_the_slowest_is_always_admitted(slowest: int, bound: int) -> None:
    assert Bounded(bound).admits(slowest, slowest)


@given(st.integers(1, 20), st.integers(0, 20))
def test_a_round_needs_its_number_or_all_that_there_are(count: int, workers: int) -> None:
    needed = FirstPushes(count).needed(workers)
    assert needed == (count if workers >= count else workers)
    assert EveryPush().needed(workers) == 0


PLANTED = {
    "lock-step waits for ever": ("Bounded", "clock <= slowest + self.bound", "clock < slowest + self.bound"),
    "one round too far": ("Bounded", "clock <= slowest + self.bound", "clock <= slowest + self.bound + 1"),
    "no worker is waited for": ("Bounded", "clock <= slowest + self.bound", "True"),
    "the bound is of all rounds": ("Bounded", "clock <= slowest + self.bound", "clock <= self.bound"),
    "a round of all": ("FirstPushes", "min(self.count, workers)", "workers"),
    "a round of more than there are": ("FirstPushes", "min(self.count, workers)", "self.count"),
    "a round of more than it needs": ("FirstPushes", "min(self.count, workers)", "max(self.count, workers)"),
    "each waits for others": ("EveryPush", "return 0", "return workers"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_histories_find_a_planted_bug(bug: str) -> None:
    name, old, new = PLANTED[bug]
    policy = mutated(module, name, old, new)

    def machine(workers: range, admission: object, combination: object) -> object:
        """A shard whose policies are those of the world, but for the one that is wrong."""
        given = [policy(**vars(each)) if type(each).__name__ == name else each for each in (admission, combination)]
        return Machines().shard(workers, *given)

    assert is_found(Machines(shard=machine))
