"""What is asked of a Ray cluster, and what a cluster that is too small is told; no cluster is started."""

from __future__ import annotations

import pytest

from headrace.engine.ray.placement import Resources, bundle_groups, require_room
from headrace.errors import InfeasiblePlan
from headrace.spec.plan import ProcessCounts

ONE_CPU = {"CPU": 1.0}


def test_workers_are_packed_and_servers_spread() -> None:
    workers, servers = bundle_groups(ProcessCounts(4, 2, 2), ONE_CPU, None)
    assert (workers.count, workers.placement) == (4, "PACK")
    assert (servers.count, servers.placement) == (4, "SPREAD")


@pytest.mark.parametrize(
    ("counts", "worker", "asked", "placement"),
    [
        (ProcessCounts(2, one_host=True), ONE_CPU, "SPREAD", "STRICT_PACK"),
        (ProcessCounts(2), {"CPU": 1.0, "GPU": 1.0}, None, "PACK"),
        (ProcessCounts(2), ONE_CPU, "SPREAD", "SPREAD"),
    ],
)
def test_what_shares_memory_is_on_one_node(
    counts: ProcessCounts, worker: Resources, asked: str | None, placement: str
) -> None:
    assert [group.placement for group in bundle_groups(counts, worker, asked)] == [placement]


def test_a_cluster_that_is_too_small_says_what_is_asked_and_what_each_node_has() -> None:
    groups = bundle_groups(ProcessCounts(64, 8), ONE_CPU, None)
    with pytest.raises(InfeasiblePlan) as refused:
        require_room(groups, {"a": {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0}, "b": {"CPU": 2.0, "slots": 3.0}})
    assert str(refused.value) == (
        "the Ray cluster is too small: 64 workers with 1 CPU each and 8 servers with 1 CPU each are asked for, and "
        "there is no room for 64 workers with 1 CPU each; the nodes have a: 4 CPU; b: 2 CPU, 3 slots; start more "
        "nodes, or ask for less"
    )


def test_servers_need_what_workers_leave() -> None:
    groups = bundle_groups(ProcessCounts(4, 2), ONE_CPU, None)
    require_room(groups, {"a": {"CPU": 4.0}, "b": {"CPU": 2.0}})
    with pytest.raises(InfeasiblePlan, match="no room for 2 servers"):
        require_room(groups, {"a": {"CPU": 4.0}, "b": {"CPU": 1.0}})


def test_one_node_must_hold_those_that_share_memory() -> None:
    groups = bundle_groups(ProcessCounts(3, one_host=True), ONE_CPU, None)
    require_room(groups, {"a": {"CPU": 1.0}, "b": {"CPU": 3.0}})
    with pytest.raises(InfeasiblePlan, match="no room for 3 workers with 1 CPU each on one node"):
        require_room(groups, {"a": {"CPU": 2.0}, "b": {"CPU": 2.0}})


def test_resources_of_a_jobs_own_count() -> None:
    groups = bundle_groups(ProcessCounts(2), {"CPU": 1.0, "fast_disk": 1.0}, None)
    with pytest.raises(InfeasiblePlan, match=r"2 workers with 1 CPU, 1 fast_disk each; the nodes have a: 8 CPU;"):
        require_room(groups, {"a": {"CPU": 8.0}})
    require_room(groups, {"a": {"CPU": 8.0}, "b": {"CPU": 2.0, "fast_disk": 2.0}})


def test_each_of_a_strict_spread_needs_a_node_of_its_own() -> None:
    groups = bundle_groups(ProcessCounts(3), ONE_CPU, "STRICT_SPREAD")
    require_room(groups, {"a": {"CPU": 1.0}, "b": {"CPU": 1.0}, "c": {"CPU": 1.0}})
    with pytest.raises(InfeasiblePlan, match="no room for 3 workers with 1 CPU each on nodes of their own"):
        require_room(groups, {"a": {"CPU": 8.0}, "b": {"CPU": 8.0}})
