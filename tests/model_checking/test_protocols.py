"""Every state of the protocols in a small bound, and what the explorer finds where something is planted.

The full bounds: scripts/check-protocols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.parameter_server.core import leases, portions, shard
from headrace.parameter_server.replication import machine as replication
from headrace.policies import membership
from headrace.policies.staleness import Bounded, FirstPushes
from model_checking.explorer import Counterexample, Step, TooMany, explore
from model_checking.failover import Failover, FailoverSetting
from model_checking.membership import Agreement, AgreementSetting
from model_checking.protocols import PROTOCOLS, three
from model_checking.pushes import Pushes, Setting
from model_checking.tables import Leases, Portions, TableSetting
from parameter_server.world import World
from parameter_server.worlds import mutated

LEAST_STATES = 90
"""Of a small bound; with fewer, a world would not do what it says."""


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("name", PROTOCOLS)
def test_from_every_state_the_end_is_within_reach(name: str) -> None:
    found = explore(PROTOCOLS[name].small())
    assert found.states > LEAST_STATES
    assert found.depth >= 9


def _two_servers(wrong: Any) -> Pushes:
    world = World(0, three(2), shards=2, portions=1, fences=(1,))
    return Pushes(Setting(world, 1, returns=False), shard=wrong)


def _lock_step(wrong: Any) -> Pushes:
    world = World(0, three(2), combination=FirstPushes(2), portions=2, fences=(1,), fixed=True)
    return Pushes(Setting(world, 1, returns=False), shard=wrong)


def _bounded(wrong: Any) -> Pushes:
    world = World(0, three(2), admission=Bounded(0), portions=2, fences=(1,), fixed=True, rests=True)
    return Pushes(Setting(world, 0), shard=wrong)


def _leases(wrong: Any) -> Leases:
    return Leases(TableSetting(2, 1, fences=(1,)), wrong)


def _portions(wrong: Any) -> Portions:
    return Portions(TableSetting(2, 0, 3, (1,)), wrong)


def _failover(wrong: Any) -> Failover:
    return Failover(FailoverSetting(2, 2, 1), wrong)


def _members(wrong: Any) -> Agreement:
    return Agreement(AgreementSetting(2, 1, 1, ("kill", "lose", "suspect")), wrong)


PLANTED: dict[str, tuple[Any, str, str, str, Callable[[Any], Any], str]] = {
    "a lease is applied twice": (
        shard, "Shard", "if push.lease not in self._done and push.finite", "if push.finite", _two_servers,
        "a lease is applied once",
    ),
    "a round waits for a member that has left": (
        shard, "Shard", "self._incarnations[worker] = incarnation\n        return self._close() + self._release()",
        "self._incarnations[worker] = incarnation\n        return self._release()", _lock_step,
        "a round that has all it needs ends",
    ),
    "the fastest goes on": (
        shard, "Shard", "and self._admission.admits(self.clocks[worker], slowest)", "and True", _bounded,
        "no worker begins a round further ahead than the bound",
    ),
    "what waits is not saved": (
        shard, "Shard", "waiting=tuple(self._waiting.values()),", "waiting=(),", _bounded,
        "a machine with a loaded state",
    ),
    "a lost worker keeps its lease": (
        leases, "LeaseTable", "if worker == event.worker])\n            self._asking",
        "if False])\n            self._asking",
        _leases, "no worker waits while there are leases",
    ),
    "all ask, and none is told to meet": (
        leases, "LeaseTable", "or len(self._asking) < len(self._present) or",
        "or len(self._asking) <= len(self._present) or",
        _leases, "another run from this state comes to the sync point",
    ),
    "a free lease is not saved": (
        leases, "LeaseTable", "free=intervals_of(self._free),", "free=(),", _leases, "a loaded state",
    ),
    "the second answer counts": (
        portions, "PortionTable", "if serial != self._serial or part in self._done:", "if serial != self._serial:",
        _portions, "all evaluations of the round",
    ),
    "a primary answers before its backup holds it": (
        replication, "Replication", "return self._deal(self.last) if self._stage == _ALONE else [Forward(self.last)]",
        "return [*([] if self._stage == _ALONE else [Forward(self.last)]), *self._deal(self.last)]", _failover,
        "nothing is dealt with while the backup is filled",
    ),
    "two processes lead": (
        replication, "Replication", "            self._stage = _IDLE\n            return [Stop",
        "            return [Stop",
        _failover, "two processes lead in epoch 3",
    ),
    "a step that one has committed is done again": (
        membership, "ViewAgreement", "elif view.done == self.done + 1 and self._holds:", "elif False:", _members,
        "have done 1 steps, and this one 0",
    ),
    "what was lost is not said again": (
        membership, "ViewAgreement", "        if self._holds and self._told and not self.frozen:\n",
        "        if False:\n",
        _members, "the end is out of reach",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_what_is_planted_is_found_with_the_shortest_way_to_it(bug: str) -> None:
    module, name, old, new, world, wrong = PLANTED[bug]
    with pytest.raises(Counterexample) as caught:
        explore(world(mutated(module, name, old, new)), most=20_000)
    assert wrong in str(caught.value)
    assert 0 < len(caught.value.steps) <= 20


def test_a_counterexample_can_be_read() -> None:
    wrong = mutated(shard, "Shard", "and self._admission.admits(self.clocks[worker], slowest)", "and True")
    with pytest.raises(Counterexample) as caught:
        explore(_bounded(wrong))
    assert str(caught.value).splitlines() == [
        "no worker begins a round further ahead than the bound; the shortest way to it has 3 steps:",
        "  1. ask 0",
        "       Ask(worker=0) → Grant(worker=0, lease=0, round=0, part=0, report=())",
        "  2. pull 0 0",
        "       Pull(worker=0, incarnation=0, least=0) → Reply(worker=0, version=0)",
        "  3. push 0 0",
        "       Push(worker=0, incarnation=0, lease=0, version=0, weight=1.0, share=0.5, finite=True) → "
        "ApplyStep(workers=(0,), share=0.5, staleness=0), Ack(worker=0, lease=0)",
        "       ✗ no worker begins a round further ahead than the bound",
    ]


class Counting:
    """A world that counts to a number, and stays where a fault has put it if it is odd."""

    def __init__(self, stop: int, at: int = 0) -> None:
        self.stop, self.at, self.said = stop, at, list[tuple[Any, Any]]()

    def steps(self) -> list[Step]:
        return [("count",)] if self.at < self.stop and self.at % 2 == 0 else []

    def faults(self) -> list[Step]:
        return [("fall",)] if self.at == 2 else []

    def do(self, step: Step) -> None:
        self.at += 2 if step == ("count",) else 1

    def copy(self) -> Counting:
        return Counting(self.stop, self.at)

    def key(self) -> Any:
        return (self.at,)

    def ended(self) -> bool:
        return self.at >= self.stop


def test_a_state_without_a_way_to_the_end_is_found() -> None:
    with pytest.raises(Counterexample, match="the end is out of reach") as caught:
        explore(Counting(6))
    assert caught.value.steps == ["count", "fall"]
    found = explore(Counting(2))
    assert (found.states, found.transitions, found.depth) == (3, 2, 2), "a fault behind the end may be as it is"


def test_more_states_than_were_to_be_explored_are_told() -> None:
    with pytest.raises(TooMany, match="more than 2 states"):
        explore(Counting(6), most=2)
