"""Who does what where a launcher has started processes on several hosts."""

from __future__ import annotations

import pytest

from headrace.errors import InfeasiblePlan
from headrace.policies.roles import require_memory, worker_roles
from headrace.spec.cluster import Cluster, Host

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
        (None, Cluster(CLUSTER.hosts, 4, "cuda"), True, "the device is cuda; use device='cpu', or one host"),
    ],
)
def test_what_cannot_be_is_refused(workers: int | None, cluster: Cluster, spread: bool, message: str) -> None:
    with pytest.raises(InfeasiblePlan, match=message):
        worker_roles("some", workers, cluster, spread)


def test_each_host_needs_memory_for_its_own_workers() -> None:
    require_memory("some", 160, CLUSTER)
    with pytest.raises(InfeasiblePlan, match="needs 41 bytes of host memory for parameters and gradients, and b has"):
        require_memory("some", 164, CLUSTER)
