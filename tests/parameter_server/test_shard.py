"""The shard: examples by hand, histories in virtual time, and bugs that the histories must find."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.parameter_server.core import shard as module
from headrace.parameter_server.core.events import (
    Accumulate,
    Ack,
    Action,
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
from headrace.policies.staleness import Admission, AllMembers, Bounded, Combination, EveryPush, FirstPushes, Unbounded
from parameter_server.virtual import Machines, Stuck, World, run
from parameter_server.worlds import DEATHS, PEACE, is_found, mutated, world

NAN = Reason.NOT_FINITE


def told(shard: Shard, *events: Event) -> list[Action]:
    return [action for event in events for action in shard.handle(event)]


def two(admission: Admission | None = None, combination: Combination | None = None) -> Shard:
    return Shard(range(2), admission or Unbounded(), combination or EveryPush())


# By hand


def test_each_push_is_a_step_and_knows_how_stale_it_is() -> None:
    shard = two()
    assert told(shard, Pull(0), Pull(1)) == [Reply(0, 0), Reply(1, 0)]
    assert told(shard, Push(1, 0, 7, 0, 1.0, 0.25), Pull(1)) == [ApplyStep((1,), 0.25, 0), Ack(1, 7), Reply(1, 1)]
    assert told(shard, Push(1, 0, 8, 1)) == [ApplyStep((1,), 1.0, 0), Ack(1, 8)]
    assert told(shard, Push(0, 0, 6, 0)) == [ApplyStep((0,), 1.0, 2), Ack(0, 6)]
    assert (shard.version, shard.clocks) == (3, {0: 1, 1: 2})


def test_a_push_without_data_is_no_step_and_one_that_is_not_finite_is_refused() -> None:
    shard = two()
    assert told(shard, Push(0, 0, 0, 0, weight=0.0)) == [Ack(0, 0)]
    assert told(shard, Push(0, 0, 1, 0, finite=False)) == [Refuse(0, 1, NAN)]
    assert (shard.version, shard.clocks) == (0, {0: 2, 1: 0})


@pytest.mark.parametrize("finite", [True, False])
def test_a_lease_is_done_once(finite: bool) -> None:
    shard = two()
    told(shard, Push(0, 0, 3, 0, finite=finite))
    assert told(shard, Push(1, 0, 3, 0)) == [Refuse(1, 3, Reason.DUPLICATE)]
    assert told(shard, Settle(), Push(1, 0, 3, 0)) == [ApplyStep((1,), 1.0, int(finite)), Ack(1, 3)]


@pytest.mark.parametrize("finite", [True, False])
def test_the_same_push_again_is_told_the_same_and_is_no_other_round(finite: bool) -> None:
    shard = two(Bounded(0))
    push = Push(0, 0, 3, 0, finite=finite)
    first = told(shard, push, Pull(0))
    assert told(shard, Join(0, 0), push, Pull(0)) == first[-1:]
    assert (shard.version, shard.clocks) == (int(finite), {0: 1, 1: 0})
    assert told(shard, Push(1, 0, 4, 0))[-1] == Reply(0, 1 + finite)


def test_who_comes_over_another_link_gives_again_what_it_gave_to_an_open_round() -> None:
    shard = two(combination=FirstPushes(2))
    push = Push(0, 0, 0, 0)
    assert told(shard, push, Join(0, 0)) == [Accumulate(0)]
    assert shard.clocks == {0: 0, 1: 0}
    assert told(shard, Push(1, 0, 1, 0)) == [Accumulate(1)]
    assert told(shard, push) == [Accumulate(0), ApplyStep((0, 1), 2.0, 0), Ack(0, 0), Ack(1, 1)]
    assert told(shard, Join(0, 0), push) == [Ack(0, 0)]
    assert shard.clocks == {0: 1, 1: 1}


def test_strangers_and_earlier_incarnations_are_refused() -> None:
    shard = two()
    assert told(shard, Push(2, 0, 0, 0), Pull(2)) == [
        Refuse(2, 0, Reason.STRANGER),
        Refuse(2, -1, Reason.STRANGER),
    ]
    assert told(shard, Join(1, 1), Push(1, 0, 0, 0), Pull(1)) == [
        Refuse(1, 0, Reason.STRANGER),
        Refuse(1, -1, Reason.STRANGER),
    ]
    assert told(shard, Leave(0), Push(0, 0, 0, 0)) == [Refuse(0, 0, Reason.STRANGER)]
    assert shard.version == 0


def test_a_pull_waits_until_the_others_are_near_enough() -> None:
    shard = two(Bounded(1))
    assert told(shard, Push(0, 0, 0, 0), Pull(0)) == [ApplyStep((0,), 1.0, 0), Ack(0, 0), Reply(0, 1)]
    assert told(shard, Push(0, 0, 2, 1), Pull(0)) == [ApplyStep((0,), 1.0, 0), Ack(0, 2)]
    assert told(shard, Push(1, 0, 1, 0)) == [ApplyStep((1,), 1.0, 2), Ack(1, 1), Reply(0, 3)]


def test_a_worker_that_leaves_delays_no_other_and_waits_for_nothing() -> None:
    shard = two(Bounded(0))
    assert told(shard, Push(0, 0, 0, 0), Pull(0))[2:] == []
    assert told(shard, Leave(1)) == [Reply(0, 1)]
    assert told(shard, Push(0, 0, 1, 1), Join(1, 1), Push(0, 0, 2, 2), Pull(0))[4:] == []
    assert told(shard, Leave(0), Push(1, 1, 3, 3)) == [ApplyStep((1,), 1.0, 0), Ack(1, 3)]


def test_a_round_takes_the_first_gradients_in_the_order_of_the_workers() -> None:
    shard = Shard(range(3), Unbounded(), FirstPushes(2))
    assert told(shard, Push(2, 0, 0, 0), Pull(2)) == [Accumulate(2)]
    assert told(shard, Push(0, 0, 1, 0)) == [
        Accumulate(0),
        ApplyStep((0, 2), 2.0, 0),
        Ack(0, 1),
        Ack(2, 0),
        Reply(2, 1),
    ]
    assert told(shard, Push(1, 0, 2, 0), Pull(1)) == [Refuse(1, 2, Reason.LATE), Reply(1, 1)]


def test_a_round_goes_on_without_what_is_empty_or_not_finite() -> None:
    shard = two(combination=FirstPushes(2))
    assert told(shard, Push(0, 0, 0, 0, finite=False), Push(1, 0, 1, 0, weight=0.0)) == [Refuse(0, 0, NAN), Ack(1, 1)]
    assert shard.version == 1
    assert told(shard, Push(0, 0, 2, 1, finite=False), Push(1, 0, 3, 1)) == [
        Accumulate(1),
        ApplyStep((1,), 2.0, 0),
        Refuse(0, 2, NAN),
        Ack(1, 3),
    ]


def test_what_a_worker_gave_to_an_open_round_goes_with_it() -> None:
    shard = Shard(range(3), Unbounded(), FirstPushes(3))
    told(shard, Push(0, 0, 0, 0), Push(1, 0, 1, 0), Pull(1))
    assert told(shard, Leave(0)) == []
    assert told(shard, Push(2, 0, 2, 0)) == [
        Accumulate(2),
        ApplyStep((1, 2), 2.0, 0),
        Ack(1, 1),
        Ack(2, 2),
        Reply(1, 1),
    ]
    assert told(shard, Join(0, 1), Push(1, 0, 3, 1), Push(0, 1, 0, 1), Leave(2))[2:3] == [ApplyStep((0, 1), 2.0, 0)]


# Histories: 17 regimes x 10 x 20 = 3,400 in every run, of which 60 a regime find what is planted; 17,000 with --full.
MANY = int(os.environ.get("HEADRACE_HISTORIES", "1000"))


@pytest.mark.every
@pytest.mark.parametrize("chunk", range(10))
@pytest.mark.parametrize("regime", PEACE)
def test_random_histories(regime: str, chunk: int) -> None:
    for seed in range(20 * chunk, 20 * chunk + 20):
        check(PEACE, regime, seed)


@pytest.mark.parametrize("chunk", range(10))
@pytest.mark.parametrize("regime", DEATHS)
def test_random_histories_in_which_workers_are_lost(regime: str, chunk: int) -> None:
    for seed in range(20 * chunk, 20 * chunk + 20):
        check(DEATHS, regime, seed)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("regime", PEACE)
def test_many_random_histories(regime: str) -> None:
    for seed in range(1_000, 1_000 + MANY):
        check(PEACE, regime, seed)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("regime", DEATHS)
def test_many_random_histories_in_which_workers_are_lost(regime: str) -> None:
    for seed in range(1_000, 1_000 + MANY):
        check(DEATHS, regime, seed)


def check(regimes: dict[str, object], regime: str, seed: int) -> None:
    lived = world(regimes, regime, seed)
    history = run(lived)
    assert history.fences, "they have met"
    if not lived.deaths:
        if isinstance(lived.admission, Bounded) and not lived.rests:
            assert history.lead <= lived.admission.bound
        if lived.fixed:
            assert len(set(history.computed)) == 1, "all do the same number of rounds"
        assert Reason.STRANGER not in history.refused
        assert Reason.DUPLICATE not in history.refused, "nothing comes twice where no worker is lost"


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_the_bound_is_reached_and_never_passed(bound: int) -> None:
    given = {"paces": (0.2, 1.0, 1.0), "admission": Bounded(bound), "portions": 3, "fences": (8,), "fixed": True}
    assert {run(World(seed, latency=0.0, shards=1 + seed % 2, **given)).lead for seed in range(6)} == {bound}


def test_a_bound_needs_portions_that_are_fixed_or_workers_that_rest() -> None:
    """Otherwise one waits for the clock of another, who waits for the portion that the first one has."""
    given = {"paces": (0.2, 4.0), "admission": Bounded(0), "portions": 3, "fences": (1, 2, 3)}
    assert stuck(*(World(seed, **given) for seed in range(20)))
    assert not stuck(*(World(seed, rests=True, **given) for seed in range(20)))


def test_an_arbiter_lets_all_shards_take_the_same_gradients_into_a_round() -> None:
    """Otherwise a late one may be of the round on one shard and not on another: it comes again, and one lacks it."""
    given = {
        "paces": (1.0,) * 4,
        "combination": FirstPushes(3),
        "portions": 3,
        "shards": 4,
        "fences": (6,),
        "latency": 6.0,
    }
    assert any(Reason.DUPLICATE in run(World(seed, **given)).refused for seed in range(10))
    assert not any(Reason.DUPLICATE in run(World(seed, arbiter=True, **given)).refused for seed in range(10))


def test_without_an_arbiter_two_workers_may_be_late_each_where_the_other_waits() -> None:
    """Both have the leases that the other's round needs, and those who have none get none."""
    given = {"paces": (4.0, 4.0, 0.2, 1.0), "combination": FirstPushes(2), "portions": 2, "shards": 4, "fences": (3, 7)}
    given |= {"latency": 10.0, "halts": 1, "eager": True}
    assert stuck(World(101112, **given))
    assert not stuck(World(101112, arbiter=True, **given))


def stuck(*worlds: World) -> int:
    """Tells in how many worlds everybody waits at last."""
    found = 0
    for each in worlds:
        try:
            run(each)
        except Stuck:
            found += 1
    return found


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_equal_workers_are_one_update_of_each_other_behind(workers: int) -> None:
    """Zhang et al. 2016, section 4: staleness has the mean N - 1, and is never more than twice that or so."""
    rounds = 60
    history = run(World(1, (1.0,) * workers, portions=workers, fences=(rounds,), latency=0.0, eager=True))
    assert len(history.staleness) == workers * rounds
    assert sum(history.staleness) / len(history.staleness) == pytest.approx(workers - 1, rel=0.05)
    assert max(history.staleness) <= 2 * workers


def test_a_slow_worker_delays_no_other_where_none_waits() -> None:
    history = run(World(1, (1.0, 1.0, 1.0, 4.0), portions=4, fences=(40,), latency=0.0))
    *fast, slow = history.computed
    assert all(3.5 < each / slow < 4.5 for each in fast)
    # 160 portions at 3.25 a second, and the end of the last one.
    assert history.ended < 160 / 3.25 + 5


def test_a_backup_worker_makes_up_for_a_slow_one() -> None:
    paces, latency = (1.0, 1.0, 1.0, 10.0), 0.0
    with_backup = run(World(1, paces, combination=FirstPushes(3), portions=3, fences=(20,), latency=latency))
    without = run(World(1, paces, combination=FirstPushes(4), portions=4, fences=(20,), latency=latency, fixed=True))
    assert without.ended > 20 * 8
    assert with_backup.ended < 20 * 1.2 + 12, "but for the portion that the slow one has at the end"
    assert with_backup.refused[Reason.LATE] >= 1


PUSHES = st.builds(
    Push,
    st.integers(0, 3),
    st.integers(0, 1),
    st.integers(0, 9),
    st.integers(0, 4),
    st.sampled_from([0.0, 1.0]),
    st.just(0.5),
    st.booleans(),
)
EVENTS = st.lists(
    st.one_of(
        PUSHES,
        PUSHES,
        st.builds(Pull, st.integers(0, 3), st.integers(0, 1), st.integers(0, 3)),
        st.builds(Join, st.integers(0, 3), st.integers(0, 1)),
        st.builds(Leave, st.integers(0, 3)),
        st.just(Renew()),
        st.builds(LeasesAhead, st.integers(0, 12)),
        st.builds(Close, st.integers(0, 3)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("admission", [Unbounded(), Bounded(0), Bounded(2)], ids=str)
@pytest.mark.parametrize("combination", [EveryPush(), FirstPushes(1), FirstPushes(2), AllMembers()], ids=str)
@given(events=EVENTS)
def test_whatever_comes_a_lease_is_applied_once_and_only_who_asked_is_answered(
    admission: Admission, combination: Combination, events: list[Event]
) -> None:
    shard = Shard(range(3), admission, combination)
    waiting: set[int] = set()
    pending: dict[int, Push] = {}
    done: set[int] = set()
    last: dict[int, Push] = {}
    versions = [shard.version]
    for event in events:
        # A pull that is refused takes nothing from one of the same worker that waits already.
        before = set(waiting)
        if isinstance(event, Leave | Join):
            waiting.discard(event.worker)
            pending.pop(event.worker, None)
        elif isinstance(event, Pull):
            waiting.add(event.worker)
        actions = shard.handle(event)
        if isinstance(event, Push) and not any(
            isinstance(action, Ack | Refuse) and action.worker == event.worker for action in actions
        ):
            # It is answered at the end of the round.
            pending[event.worker] = event
        for action in actions:
            if isinstance(action, Reply):
                waiting.remove(action.worker)
                assert action.version == shard.version
            elif isinstance(action, Refuse) and action.lease < 0:
                waiting -= {action.worker} - before
            elif isinstance(action, Accumulate):
                assert isinstance(event, Push)
                assert action.worker == event.worker
            elif isinstance(action, ApplyStep):
                assert len(action.workers) <= max(combination.needed(len(shard.clocks)), 1)
            elif isinstance(action, Ack):
                # A push without an answer may be followed by the one that completes a round of one.
                made = pending.pop(action.worker, event)
                assert isinstance(made, Push)
                assert action.lease == made.lease
                assert made.finite
                assert action.lease not in done or last.get(action.worker) == made, "who asks again is answered again"
                done.add(action.lease)
                last[action.worker] = made
            elif isinstance(action, Refuse) and action.reason == NAN:
                done.add(action.lease)
        versions.append(shard.version)
        assert waiting <= shard.clocks.keys(), "only members wait"
    assert all(0 <= newer - older <= 1 for older, newer in pairwise(versions))


PLANTED = {
    "stepped twice": ("if push.lease not in self._done and push.finite", "if push.finite"),
    "done twice": ("Reason.DUPLICATE if push.lease in self._done else refused", "refused"),
    "older incarnations": ("if self._incarnations.get(worker) != push.incarnation:", "if worker not in self.clocks:"),
    "late ones count": ("if push.version != self.version or", "if"),
    "a duplicate is no round": (
        "+= 1\n        step: list[Action] = []",
        "+= push.lease not in self._done\n        step: list[Action] = []",
    ),
    "a duplicate is not of the round": (
        "elsewhere or worker in self._contributed:",
        "elsewhere or worker in self._contributed or done:",
    ),
    "staleness from nowhere": ("self.version - push.version)", "self.version)"),
    "who leaves ends no round": (
        "= incarnation\n        return self._close() + self._release()",
        "= incarnation\n        return self._release()",
    ),
    "who left still waits": ("self._waiting.pop(worker, None)", "pass"),
    "who left still counts": ("if self._contributed.pop(worker, None) is not None:", "if False:"),
    "parameters too old": ("and pull.least <= self.version", "and True"),
    "rounds with numbers of their own": ("self.version = max(self.version, event.version)", "pass"),
    "no short round": ("needed = min(needed, self._ahead - len(self._done))", "pass"),
    "a round too early": ("len(self._contributed) < needed and", "len(self._contributed) < needed - 1 and"),
    "NaN in the mean": ("if isinstance(answer, Ack) and push.weight", "if push.weight"),
    "who is overdue is waited for": ("len(self.clocks) - len(self._overdue))", "len(self.clocks))"),
    "who waits long waits longer": ("< needed and not early)", "< needed)"),
    "who came is not waited for": ("        self._overdue.discard(worker)\n        last", "        last"),
    "NaN stepped": ("not in self._done and push.finite and", "not in self._done and"),
    "no worker is released": ("self._finish(push), *self._release()]", "self._finish(push)]"),
    "who comes late is behind": ("min(self.clocks.values(), default=0))", "0)"),
    "who comes again keeps its clock": ("!= incarnation:", "is None:"),
}


@pytest.mark.full
@pytest.mark.parametrize("bug", PLANTED)
def test_histories_find_a_planted_bug(bug: str) -> None:
    assert is_found(Machines(shard=mutated(module, "Shard", *PLANTED[bug])))
