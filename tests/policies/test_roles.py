"""Who does what where a launcher has started processes on several hosts."""

from __future__ import annotations

import doctest
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InfeasiblePlan, UsageError
from headrace.policies import roles as module
from headrace.policies.roles import (
    bounds,
    require_memory,
    split,
    threads_per_worker,
    worker_and_server_roles,
    worker_roles,
)
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec

CLUSTER = Cluster((Host("a", 8, 100, ranks=(0, 3)), Host("b", 3, 40, ranks=(1,)), Host("c", 2, 40, ranks=(2,))), 4)


def test_every_rank_is_where_the_launcher_has_started_it() -> None:
    roles = worker_roles("mirrored", None, CLUSTER, spread=True)
    assert [(role.rank, role.host, role.threads, role.data_rank) for role in roles] == [
        *[(0, "a", 4, 0), (1, "b", 3, 1), (2, "c", 2, 2), (3, "a", 4, 3)]
    ]
    assert {(role.kind, role.device) for role in roles} == {("worker", "cpu")}


@pytest.mark.parametrize(
    ("workers", "cluster", "spread", "message"),
    [
        (None, CLUSTER, False, "some works on one host, this cluster has 3: a, b, c; use mirrored or"),
        (4, Cluster(CLUSTER.hosts), True, "some works on one host, this cluster has 3: a, b, c; start a process on"),
        (3, CLUSTER, True, "some asks for 3 workers and the launcher started 4 processes"),
        (
            None,
            Cluster(CLUSTER.hosts, 4, "cuda"),
            True,
            "asks for 2 workers on cuda and a has 0 such",
        ),
    ],
)
def test_what_cannot_be_is_refused(workers: int | None, cluster: Cluster, spread: bool, message: str) -> None:
    with pytest.raises(InfeasiblePlan, match=message):
        worker_roles("some", workers, cluster, spread)


def test_each_host_needs_memory_for_its_own_workers() -> None:
    roles, model = worker_roles("some", None, CLUSTER, spread=True), ModelSpec(())
    require_memory("some", 160, CLUSTER, roles, model)
    with pytest.raises(InfeasiblePlan, match="needs 41 bytes of host memory for parameters and gradients, and b has"):
        require_memory("some", 164, CLUSTER, roles, model)


@given(st.integers(1, 256), st.integers(1, 256))
def test_workers_fill_the_cores_and_no_more(cores: int, workers: int) -> None:
    threads = threads_per_worker(cores, workers)
    assert threads >= 1
    assert threads * workers <= max(cores, workers)
    assert (threads + 1) * workers > cores


@pytest.mark.parametrize(("cores", "workers"), [(0, 1), (1, 0)])
def test_nothing_cannot_be_shared(cores: int, workers: int) -> None:
    with pytest.raises(UsageError, match=f"got {cores} and {workers}"):
        threads_per_worker(cores, workers)


SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


def test_the_examples_in_the_docstrings_hold() -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@given(st.integers(0, 10_000), SHARES)
def test_nothing_is_lost_and_everyone_is_within_one_of_the_proportion(count: int, shares: list[int]) -> None:
    sizes = split(count, shares)
    assert len(sizes) == len(shares)
    assert sum(sizes) == count
    for size, share in zip(sizes, shares, strict=True):
        # |size - count * share / total| < 1, without floating point
        assert abs(size * sum(shares) - count * share) < sum(shares)
        assert size == 0 or share > 0


@given(st.integers(0, 10_000), st.integers(1, 16), st.integers(1, 5))
def test_equal_shares_differ_by_one_at_most_and_the_first_get_more(count: int, workers: int, share: int) -> None:
    sizes = split(count, (share,) * workers)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(0, 10_000), SHARES)
def test_bounds_run_through_the_batch_without_gaps(count: int, shares: list[int]) -> None:
    edges = bounds(count, shares)
    assert edges[0][0] == 0
    assert edges[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert tuple(stop - start for start, stop in edges) == split(count, shares)


@pytest.mark.parametrize(
    ("hosts", "workers"),
    [("aba", "ab"), ("abba", "ab"), ("bbaa", "bb")],
)
def test_the_last_ranks_of_several_hosts_serve(hosts: str, workers: str) -> None:
    servers = len(hosts) - len(workers)
    roles = worker_and_server_roles("some", None, servers, _cluster(hosts))
    assert [(role.rank, role.kind, role.host) for role in roles] == [
        (rank, "worker" if rank < len(workers) else "server", host) for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "kinds"),
    [
        ("aab", "wsb"),
        ("ababa", "wsbbs"),
        ("aaabb", "wssbb"),
        ("cabba", "wssbb"),
    ],
)
def test_a_backup_is_on_another_host_than_its_server(hosts: str, kinds: str) -> None:
    roles = worker_and_server_roles("some", None, (len(hosts) - 1) // 2, _cluster(hosts), 1)
    assert "".join(role.kind[0] for role in roles) == kinds
    assert "".join(role.host for role in roles) == hosts


def test_backups_without_a_host_of_their_own_are_refused() -> None:
    message = "the last 2 processes are rank 1 on b, rank 2 on b; let the launcher number these processes by turns"
    with pytest.raises(InfeasiblePlan, match=message):
        worker_and_server_roles("some", None, 1, _cluster("abb"), 1)
    with pytest.raises(InfeasiblePlan, match="launcher started all processes on one host, with which a server and"):
        worker_and_server_roles("some", None, 1, _cluster("aaa"), 1)


def _cluster(hosts: str) -> Cluster:
    """Returns the cluster of a launcher that has started each rank on the host of that letter."""
    placed = {name: tuple(rank for rank, each in enumerate(hosts) if each == name) for name in sorted(set(hosts))}
    return Cluster(tuple(Host(name, 4, 100, ranks=ranks) for name, ranks in placed.items()), len(hosts))
