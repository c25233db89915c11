"""What servers did, and which carries too much."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.wire import ShardLayout, ShardSpec
from headrace.report.model.events import attempts
from headrace.report.model.servers import (
    ROUNDS,
    ServerCounts,
    Staleness,
    imbalance,
    imbalances,
    staleness_over_time,
    to_mean,
)
from headrace.report.model.summary import summarize
from headrace.report.model.training import TrainingClock
from headrace.report.views.table import run_plain
from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Lost,
    RunEnded,
    RunStarted,
    ServerEnded,
    ServerStarted,
    ServerStats,
    ShardStats,
    Stepped,
)
from headrace.spec.plan import Plan, Role


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 2), (16, 4)])
def test_servers_are_no_workers(tmp_path, make_served_run, workers, servers):
    summary = summarize(make_served_run(tmp_path / "run", workers, servers))
    assert summary.workers == workers
    assert set(summary.times_by_rank) == set(summary.servers.waiting) == set(range(workers))
    assert set(summary.servers.by_rank) == set(range(workers, workers + servers))
    # As many steps as fit into 6 s, at each worker's own speed, of 8 examples each.
    steps = sum(int(60 / (rank + 1) + 1e-6) for rank in range(workers))
    assert summary.training.examples == 8 * steps
    assert summary.steps == -(-steps // workers)
    assert summary.training.seconds == pytest.approx(6.0)
    assert summary.outcome.hosts == ("mill", "weir")


def test_what_they_counted_is_added_up(tmp_path, make_served_run):
    servers = summarize(make_served_run(tmp_path / "run", 4, 2)).servers
    for worker in range(4):
        # 60 updates of each of 4 shards: two in three are 3 behind, one in three 6.
        assert servers.staleness[worker].counts == {3: 160, 6: 80}
    assert servers.staleness_of_all.counts == {3: 640, 6: 320}
    assert servers.staleness_of_all.mean == 4.0
    assert servers.pushes == 4 * 4 * 60
    assert servers.refused == {"late": 4, "not_finite": 2}
    assert servers.refused_share == pytest.approx(6 / 960)
    # They were busy for 1.5 of the 6 s after the first step began.
    assert servers.busy_share == pytest.approx(0.25)
    assert servers.queue_longest == 4
    assert servers.by_rank[5].moved_bytes == 2 * 240 * 8040
    assert servers.by_rank[5].apply_s == pytest.approx(1e-7 * 240 * 8040)
    assert servers.waiting[1].answers_s == {4: pytest.approx(0.3), 5: pytest.approx(0.6)}
    assert servers.waiting[1].compute_s == pytest.approx(3.0)
    assert [point.seconds for point in servers.over_time] == pytest.approx([1, 2, 3, 4, 5, 6])


def test_memory_and_bytes_are_those_of_workers_and_servers(tmp_path, make_served_run):
    cost = summarize(make_served_run(tmp_path / "run", 2, 2)).cost
    assert cost.peak_memory_bytes == 100_000_003
    assert cost.parameter_bytes == 2 * 4040 + 4040 + 8040
    assert cost.optimizer_bytes == 2 * 500
    # Once: what servers moved is what workers moved.
    assert cost.moved_bytes_per_step == pytest.approx(2 * 6000 / 45)


def test_a_server_that_did_not_live_to_say_leaves_no_cheaper_run(tmp_path, make_served_run, write_events):
    run_dir = make_served_run(tmp_path / "run", 2, 2)
    lines = (run_dir / "events" / "rank-3.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "events" / "rank-3.jsonl").write_text("".join(lines[:4]))
    summary = summarize(run_dir)
    assert summary.cost.parameter_bytes is None
    # What it said last counts.
    assert summary.servers.by_rank[3].busy_s == pytest.approx(0.75)
    assert summary.servers.by_rank[3].busy_share == pytest.approx(0.25)


def test_runs_without_servers_have_none(tmp_path, make_run, write_events):
    assert summarize(make_run(tmp_path / "mirrored")).servers is None
    silent = make_run(tmp_path / "silent", extra=[ServerStarted(2, 0.9, "weir", 5, 2, 4040)])
    assert summarize(silent).servers is None


def test_means_of_rounds_belong_to_no_worker(tmp_path, make_run):
    served = ServerStats(2, 2.0, 0.1, 1.0, 1, {"-1": {"0": 10}}, {"0": 0.5, "1": 0.25}, {"late": 3}, _shards(1000))
    servers = summarize(make_run(tmp_path / "a", "parameter_server", extra=[served])).servers
    assert set(servers.staleness) == {ROUNDS}
    assert servers.staleness_of_all.largest == 0
    assert [servers.waiting[worker].answers_s for worker in (0, 1)] == [{2: 0.5}, {2: 0.25}]


def test_what_a_server_really_says_is_understood(tmp_path, make_run):
    counters = ServerCounters(ShardLayout([ShardSpec("weight", 0, (1000,)), ShardSpec("bias", 0, (10,))]))
    counters.queued(3)
    counters.stepped((0, 1), worker=1, staleness=2, seconds=0.101)
    counters.answered(1, pushed=(0, 1), pulled=(0,), seconds=0.25)
    servers = summarize(make_run(tmp_path / "a", extra=[counters.event(2, 2.0)])).servers
    assert servers.staleness[1].counts == {2: 2}
    assert servers.waiting[1].answers_s == {2: 0.25}
    assert servers.by_rank[2].moved_bytes == 4000 + 40 + 4000
    assert servers.by_rank[2].apply_s == pytest.approx(0.101)
    assert servers.queue_longest == 3


def test_attempts_add_up(tmp_path, make_served_run, write_events):
    run_dir = make_served_run(tmp_path / "run", 2, 2)
    before = summarize(run_dir)
    started = structs.replace(before.started, time_s=10.0, resumed_step=45)
    # The third server is new; the second is gone.
    events = [
        started,
        *(ServerStarted(rank, 11.0, "weir", 7, 2, 4040) for rank in (2, 4)),
        ServerStats(2, 13.0, 1.0, 3.0, 9, {"0": {"7": 5}}, {"0": 0.2}, {"late": 1}, _shards(1000)),
        ServerStats(4, 13.0, 0.5, 2.0, 1, {"0": {"7": 5}}, {"0": 0.1}, {}, _shards(10)),
        *(ServerEnded(rank, 13.1, 1, 2, 3, 4) for rank in (2, 4)),
        RunEnded(LAUNCHER, 14.0, "ok"),
    ]
    servers = summarize(write_events(run_dir, events)).servers
    assert set(servers.by_rank) == {2, 3, 4}
    work = servers.by_rank[2]
    assert (work.busy_s, work.seconds) == (pytest.approx(1.5 + 1.0), pytest.approx(6.0 + 2.0))
    assert (work.queue_mean, work.queue_longest) == (3.0, 9)
    assert {shard.name: shard.pushes for shard in work.shards} == {"weight": 120 + 10, "bias": 120}
    assert servers.by_rank[3] == before.servers.by_rank[3]
    assert servers.refused == {"late": 5, "not_finite": 2}
    assert servers.staleness[0].counts == {**before.servers.staleness[0].counts, 7: 10}
    assert servers.waiting[0].answers_s == {2: pytest.approx(0.5), 3: pytest.approx(0.6), 4: pytest.approx(0.1)}


def test_what_a_server_did_before_it_was_replaced_counts_too(tmp_path, make_served_run):
    shard = ShardStats("weight", 4000, 10, 10, 10, 0.1, 1000, 1000)
    lost = (
        Lost(LAUNCHER, 7.05, 2, 0, "killed", replaced=True),
        ServerStarted(2, 7.06, "weir", 7, 1, 4040),
        ServerStats(2, 7.09, 0.02, 3.0, 9, {"0": {"7": 5}}, {"0": 0.2}, {"late": 1}, (shard,)),
    )
    before = summarize(make_served_run(tmp_path / "whole", 2, 1)).servers
    after = summarize(make_served_run(tmp_path / "lost", 2, 1, extra=lost)).servers
    first, both = before.by_rank[2], after.by_rank[2]
    assert (both.busy_s, both.seconds) == (pytest.approx(first.busy_s + 0.02), pytest.approx(first.seconds + 0.03))
    assert both.moved_bytes == first.moved_bytes + 2000
    assert (both.queue_mean, both.queue_longest) == (3.0, 9)
    assert after.staleness[0].counts == {**before.staleness[0].counts, 7: 5}
    assert after.refused["late"] == before.refused["late"] + 1
    assert sum(point.staleness.updates for point in after.over_time) == after.staleness_of_all.updates


def test_the_json_values_say_the_same(tmp_path, make_served_run, make_run):
    plain = run_plain(summarize(make_served_run(tmp_path / "run", 4, 2)))["servers"]
    assert plain["staleness"] == {
        "mean": 4.0,
        "median": 3,
        "p99": 6,
        "largest": 6,
        "updates": 960,
        "counts": {"3": 640, "6": 320},
    }
    assert plain["staleness_by_worker"]["3"]["updates"] == 240
    assert plain["staleness_over_time"][0]["mean"] == pytest.approx(3.9)
    assert plain["refused_share"] == pytest.approx(6 / 960)
    assert plain["by_rank"]["5"]["busy_share"] == pytest.approx(0.25)
    assert plain["by_rank"]["5"]["shards"][0]["pushed_bytes"] == 240 * 8000
    assert plain["waiting"]["0"]["answers_s"]["5"] == pytest.approx(0.6)
    assert run_plain(summarize(make_run(tmp_path / "mirrored")))["servers"] is None


def _shards(*sizes, apply_s=0.2, times=1000):
    names = ("weight", "bias", "gain")
    return tuple(
        ShardStats(name, size, 10, 10, 10, apply_s * size / sum(sizes), times * size, times * size)
        for name, size in zip(names, sizes, strict=False)
    )


def _says(rank, shards, queue_mean=1.0, time_s=2.0):
    return ServerStats(rank, time_s, 0.1, queue_mean, 4, {}, {}, {}, shards)


def test_a_server_with_more_than_its_share_is_named_with_its_shard():
    said = imbalance([_says(4, _shards(1000, 10)), _says(5, _shards(5000, 10))])
    assert said == (
        "uneven servers: server 5 moves 1.66 × the mean of the bytes (10.0 MB), its shard weight 3.32 × the shards' "
        "mean; remedy: smaller shards (sharding='max_size:...'), with placement='greedy'"
    )


def test_even_servers_are_not_worth_a_line_however_large_a_shard():
    assert imbalance([_says(4, _shards(1000, 10)), _says(5, _shards(1000, 10))]) is None
    assert imbalance([_says(4, _shards(5000, 10))]) is None
    assert imbalance([]) is None
    assert imbalance([_says(4, ()), _says(5, ())]) is None


def test_what_moves_little_is_not_worth_a_line():
    few = [_says(4, _shards(1000, 10, times=90)), _says(5, _shards(5000, 10, times=90))]
    assert imbalance(few) is None
    assert imbalance([few[0], _says(5, _shards(5000, 10, times=100))]) is not None


def test_a_shard_that_tilts_its_server_is_named_below_the_servers_bound():
    three = (700, 700, 700)
    said = imbalance([_says(4, _shards(*three)), _says(5, _shards(2800, 10, 10))])
    assert "server 5 moves 1.15 × the mean of the bytes" in said
    assert "its shard weight 3.41 × the shards' mean" in said


def test_the_time_to_apply_counts_where_there_is_some():
    def said(*seconds):
        return imbalance([_says(4 + at, _shards(100, 100, 100, apply_s=each)) for at, each in enumerate(seconds)])

    assert "server 5 needs 1.82 × the mean of the time to apply (900 ms)" in said(0.09, 0.9)
    assert said(0.6, 0.9) is None
    assert said(0.009, 0.09) is None


def test_a_queue_counts_where_there_is_one():
    shards = _shards(100)
    said = imbalance([_says(4, shards, 1.0), _says(5, shards, 7.0), _says(6, shards, 1.0)])
    assert "server 5 has 2.33 × the mean queue (7.0 messages)" in said
    assert imbalance([_says(4, shards, 0.2), _says(5, shards, 1.9), _says(6, shards, 0.1)]) is None


def test_the_last_word_of_each_server_counts():
    early = [_says(4, _shards(10), time_s=1.0), _says(5, _shards(9000), time_s=1.0)]
    assert imbalance(early) is not None
    assert imbalance([*early, _says(4, _shards(9000))]) is None


def test_a_server_and_its_backup_are_one_whichever_began_later():
    kinds = ("server", "server", "backup", "backup")
    plan = Plan(
        "parameter_server", {}, tuple(Role(at, kind, "here", "cpu", 1, -1) for at, kind in enumerate(kinds)), (), 0, ()
    )
    even, large, begun = _shards(1000, 10), _shards(5000, 10), _shards(10, 1)
    assert imbalances(plan, {0: _says(0, begun), 1: _says(1, even), 2: _says(2, even), 3: _says(3, even)}) == []
    (line,) = imbalances(plan, {0: _says(0, begun), 1: _says(1, even), 2: _says(2, large), 3: _says(3, begun)})
    assert line.startswith("uneven servers: server 2 moves 1.66 × the mean of the bytes (10.0 MB), its shard weight")


def test_times_the_mean():
    assert to_mean([1.0, 4.0, 1.0]) == (2.0, 1)
    assert to_mean([0, 0]) == (1.0, 0)


COUNTS = st.dictionaries(st.integers(0, 300).map(str), st.integers(0, 50), max_size=12)


@pytest.mark.slow
@given(st.lists(COUNTS, max_size=4))
def test_the_numbers_are_those_of_the_updates_one_by_one(counts):
    updates = sorted(int(staleness) for each in counts for staleness, count in each.items() for _ in range(count))
    staleness = Staleness.of(counts)
    if not updates:
        assert staleness is None
        return
    assert staleness.updates == len(updates)
    assert staleness.mean == pytest.approx(sum(updates) / len(updates))
    assert staleness.largest == updates[-1]
    for percent in (50, 99, 100):
        assert staleness.percentile(percent) == updates[math.ceil(percent * len(updates) / 100) - 1]


def _started(time_s=0.0, resumed=0):
    return RunStarted(LAUNCHER, time_s, "parameter_server", 2, "cpu", 1, 8, 80, "now", {}, {}, resumed_step=resumed)


def _step(rank, time_s, step):
    return Stepped(rank, time_s, step, 0, 4, 1.0, 4.0, 0.0, 0.5, 0.5, 0.0)


def _served(rank, time_s, staleness):
    return ServerStats(rank, time_s, 0.1, 1.0, 1, staleness, {}, {}, ())


def _over_time(events):
    begun = attempts(events)
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    counted = ServerCounts()
    for event in events:
        counted.add(event)
    return staleness_over_time(counted, TrainingClock((attempt.steps for attempt in begun), evaluated))


def test_over_time_is_the_difference_between_two_events_of_all_servers():
    events = [
        _started(),
        *(_step(rank, 11.0 + second, second) for second in range(4) for rank in (0, 1)),
        _served(2, 11.2, {"0": {"0": 4}}),
        _served(3, 11.3, {"1": {"2": 4}}),
        _served(2, 12.2, {"0": {"0": 4, "1": 2}, "1": {"3": 2}}),
        _served(2, 13.2, {"0": {"0": 4, "1": 2}, "1": {"3": 2}}),
        _served(3, 13.3, {"1": {"2": 4, "5": 1}}),
        _served(2, 14.0, {"0": {"0": 4, "1": 2}, "1": {"3": 3}}),
    ]
    # Training begins at 10 s.
    points = _over_time(events)
    assert [point.seconds for point in points] == pytest.approx([1.3, 2.2, 3.3, 4.0])
    assert [point.staleness.counts for point in points] == [{0: 4, 2: 4}, {1: 2, 3: 2}, {5: 1}, {3: 1}]


def test_evaluations_take_no_time_and_a_resumed_run_begins_to_count_anew():
    first = [_step(0, 1.0 + second, second) for second in range(3)]
    again = [_step(0, 21.0 + second, 2 + second) for second in range(2)]
    events = [
        _started(),
        *first,
        _served(2, 2.0, {"0": {"1": 10}}),
        _served(2, 3.0, {"0": {"1": 19}}),
        _started(20.0, resumed=2),
        *again,
        _served(2, 21.5, {"0": {"4": 7}}),
    ]
    # Of the first attempt two steps count, from 0 to 2 s; of the second both, from 20 to 22 s.
    points = _over_time(events)
    assert sum(point.staleness.updates for point in points) == 26
    assert points[-1].staleness.counts == {4: 7}
    assert points[-1].seconds == pytest.approx(3.5)
    evaluated = Evaluated(0, 1.9, 1, 0, 5, {"loss": 1.0}, 0.8)
    shorter = _over_time([*events[:4], evaluated, *events[4:]])
    assert shorter[-1].seconds == pytest.approx(2.7)


def test_a_long_run_has_no_more_points_than_can_be_seen():
    events = [_started(), *(_step(0, 1.0 + second, second) for second in range(5000))]
    events += [_served(2, 1.0 + second, {"0": {"1": second}}) for second in range(1, 5000)]
    points = _over_time(events)
    assert 150 < len(points) <= 201
    assert sum(point.staleness.updates for point in points) == 4999
    assert all(one.seconds < two.seconds for one, two in itertools.pairwise(points))
