"""The simulator's pieces: schedules swept, collectives, failures, virtual time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import UsageError
from headrace.pipeline.schedules import SCHEDULES
from headrace.pipeline.schedules.schedule import Action, timed
from headrace.prediction.simulation.failures import interval, reliability, useful_share
from headrace.prediction.simulation.network import Network
from headrace.prediction.simulation.served import Line, VirtualClock
from headrace.prediction.simulation.sweep import StageTimes, bubble_rate, program, sweep
from headrace.spec.cluster import Cluster, Host, Link
from prediction.simulation.scenes import EXACT, gpus


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (3, 7), (4, 8)])
def test_a_sweep_is_the_schedule_as_it_is_timed(name: str, ranks: int, micro_batches: int) -> None:
    schedule = SCHEDULES[name](ranks, micro_batches, 2)
    stages = [StageTimes(2.0 + stage, 3.0, 1.0, 0.25) for stage in range(schedule.stages())]

    def cost(action: Action) -> float:
        return stages[action.stage].of(action.kind)

    spans = timed(schedule.orders(), cost, transfer=0.25)
    swept = sweep(schedule, stages, np.zeros((ranks, 2)), np.array([[1.0, 2.0]] * ranks))
    known = program(schedule)
    ended = {action: float(swept.ended[place, 0]) for rank in range(ranks) for place, action in known.actions(rank)}
    assert {span.action: span.stop for span in spans} == ended
    # A replica that is twice as slow takes twice as long but for what crosses.
    assert all(slow[1] >= slow[0] for slow in swept.rank_ended)


@pytest.mark.parametrize("count", [24, 64])
def test_bubbles_are_those_of_the_zero_bubble_paper(count: int) -> None:
    ranks, forward, inputs, weights, transfer = 8, 3.0, 2.5, 1.5, 0.1
    stage = StageTimes(forward, inputs, weights, transfer)
    extra = {
        "1f1b": (ranks - 1) * (forward + inputs + weights)
        + transfer * (2 * (ranks - 1) * count / ranks + 2 * (ranks - 2)),
        "zb_h1": (ranks - 1) * (forward + inputs - weights + 4 * transfer),
        "zb_h2": (ranks - 1) * (forward + inputs - 2 * weights + 2 * transfer),
    }
    for name, idle in extra.items():
        whole = count * (forward + inputs + weights) + idle
        assert bubble_rate(SCHEDULES[name](ranks, count), stage) == pytest.approx(idle / whole, abs=1e-9), name


def test_zb_h2_holds_no_more_than_it_says() -> None:
    schedule = SCHEDULES["zb_h2"](4, 16)
    assert [schedule.held(stage) for stage in range(4)] == [7, 7, 7, 7]


def test_all_reduce_takes_what_its_algorithm_says() -> None:
    hosts, network = gpus(8).hosts, Network(gpus(8), EXACT)
    size = 800_000_000
    assert network.all_reduce(hosts, "ring").seconds(size) == pytest.approx(2 * 7 / 8 * 0.8)
    assert network.all_reduce(hosts, "tree").seconds(size) == pytest.approx(2 * 3 * 0.8)
    assert network.all_reduce(hosts, "halving_doubling").seconds(size) == pytest.approx(2 * 7 / 8 * 0.8)
    assert network.all_reduce(hosts[:3], "halving_doubling").seconds(size) == pytest.approx((1 + 2) * 0.8)
    late = Network(Cluster(hosts, device="cuda", link_bytes_per_s=1e9, link_latency_s=0.01), EXACT)
    assert late.all_reduce(hosts, "ring").seconds(8) == pytest.approx(14 * 0.01)
    assert late.all_reduce(hosts, "halving_doubling").seconds(8) == pytest.approx(6 * 0.01)
    assert network.all_reduce(hosts[:1]).seconds(size) == 0


def test_a_host_adds_up_inside_before_it_sends() -> None:
    cluster = gpus(2, 4)
    workers = [host for host in cluster.hosts for _ in range(4)]
    network = Network(cluster, replace(EXACT, network_share=0.5, algorithm="hierarchical"))
    inside = 2 * 3 / 4 * 1e9 / 10e9
    assert network.all_reduce(workers, "hierarchical").seconds(1e9) == pytest.approx(inside + 1e9 / 0.5e9)
    assert network.all_reduce(workers[:4], "ring").seconds(1e9) == pytest.approx(inside)


def test_links_that_share_a_switch_divide_it() -> None:
    hosts = tuple(Host(name, 1, 1) for name in "abc")
    pairs = [("a", "b"), ("b", "c"), ("c", "a")]
    links = tuple(Link(*pair, 3e9, 0.0, "switch") for one in pairs for pair in (one, one[::-1]))
    way = Network(Cluster(hosts, links=links), replace(EXACT, network_share=1.0)).all_reduce(hosts, "ring")
    assert way.seconds(3e9) == pytest.approx(2 * 2 / 3 * 3)


def test_the_interval_is_youngs_where_checkpoints_are_short() -> None:
    assert interval(1e6, 1.0) == pytest.approx(math.sqrt(2e6), rel=2e-3)
    assert interval(100.0, 300.0) == 100.0
    hosts = [Host(f"h{index}", 1, 1, hours_between_failures=100) for index in range(50)]
    found = reliability(hosts, 10, 60)
    assert found is not None
    assert found.hours_between == pytest.approx(2.0)
    assert reliability([Host("a", 1, 1)], 10, 60) is None


def test_hosts_that_fail_before_a_restart_is_over_are_refused() -> None:
    hosts = [Host(f"h{index}", 1, 1, hours_between_failures=0.01) for index in range(500)]
    with pytest.raises(UsageError, match=r"500 hosts of which one fails every 0\.072 s .* get no further: .* 60 s; is"):
        reliability(hosts, 10, 60)


def test_no_other_interval_leaves_more_of_the_time() -> None:
    mean_s, checkpoint_s, restart_s = 3600.0, 30.0, 120.0
    best = interval(mean_s, checkpoint_s)
    share = useful_share(mean_s, best, checkpoint_s, restart_s)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert useful_share(mean_s, factor * best, checkpoint_s, restart_s) < share


def sampled_share(mean_s: float, every_s: float, checkpoint_s: float, restart_s: float, intervals: int) -> float:
    """Returns the useful share of the time, from failures that are drawn at random."""
    random = np.random.default_rng(0)
    spent = 0.0
    for _ in range(intervals):
        while (until := float(random.exponential(mean_s))) < every_s + checkpoint_s:
            spent += until
            # It may fail again while it starts.
            while (again := float(random.exponential(mean_s))) < restart_s:
                spent += again
            spent += restart_s
        spent += every_s + checkpoint_s
    return intervals * every_s / spent


def test_failures_drawn_at_random_cost_what_the_formula_says() -> None:
    for every_s in (200.0, 1500.0):
        exact = useful_share(3600.0, every_s, 30.0, 120.0)
        assert sampled_share(3600.0, every_s, 30.0, 120.0, intervals=20_000) == pytest.approx(exact, rel=0.01)
    assert useful_share(1.0, 1e5, 1.0, 1.0) == 0.0


def test_virtual_time_goes_forward_and_ties_keep_their_order() -> None:
    clock, seen = VirtualClock(), []
    for time_s, number in ((2.0, 1), (1.0, 2), (2.0, 3)):
        clock.at(time_s, lambda which: seen.append((clock.now, which)), number)
    clock.run()
    assert seen == [(1.0, 2), (2.0, 1), (2.0, 3)]
    line = Line()
    assert [line.occupy(0.0, 2.0), line.occupy(1.0, 2.0), line.occupy(10.0, 1.0)] == [2.0, 4.0, 11.0]
