"""Assigning data to workers: which part each one reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import headrace as hr
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data import Hosts, from_arrays, local
from headrace.errors import UsageError
from headrace.spec.plan import Plan, Role
from headrace.worker.session import DataAssignment, assign_data

HOSTS = ("a", "b", "b", "a", "b")
COUNTS = {"a": 30, "b": 12}


def plan_on(hosts: tuple[str, ...], shares: tuple[int, ...], servers: int = 0) -> Plan:
    roles = [Role(rank, "worker", host, "cpu", 1, rank) for rank, host in enumerate(hosts)]
    roles += [Role(len(hosts) + server, "server", hosts[0], "cpu", 1, -1) for server in range(servers)]
    return Plan("mirrored", {}, tuple(roles), shares, 0, ())


def seats(plan: Plan, counts: dict[str, int]) -> list[DataAssignment]:
    meeting = ThreadGroup(plan.workers)

    def find(role: Role) -> DataAssignment:
        pipeline = local(from_arrays(torch.arange(counts[role.host])))
        return assign_data(pipeline, plan, role, ThreadCollective(meeting, role.rank))

    with ThreadPoolExecutor(plan.workers) as pool:
        return list(pool.map(find, plan.roles[: plan.workers]))


def test_hosts_tell_each_other_how_much_they_have() -> None:
    found = seats(plan_on(HOSTS, (1, 2, 3, 4, 5)), COUNTS)
    assert [each.pipeline.hosts for each in found] == [Hosts((30, 12), int(host == "b")) for host in HOSTS]
    assert [each.shares for each in found] == [(1, 4), (2, 3, 5), (2, 3, 5), (1, 4), (2, 3, 5)]
    assert [each.rank for each in found] == [0, 0, 1, 1, 2]


def test_on_one_host_all_workers_share_all_data() -> None:
    plan = plan_on(("a", "a"), (1, 3))
    data = local(from_arrays(torch.arange(9)))
    # No other rank is asked: there is none.
    assert assign_data(data, plan, plan.roles[1], ThreadCollective(ThreadGroup(2), 1)) == DataAssignment(
        data, (1, 3), 1
    )


def test_data_that_every_host_lists_is_everybodys() -> None:
    plan = plan_on(("a", "b"), (1, 3))
    data = from_arrays(torch.arange(9))
    assert assign_data(data, plan, plan.roles[1], ThreadCollective(ThreadGroup(2), 1)) == DataAssignment(
        data, (1, 3), 1
    )


def test_leased_portions_are_of_data_that_every_host_has() -> None:
    plan = replace(plan_on(("a", "b"), (1, 1), servers=1), strategy="parameter_server")
    with pytest.raises(UsageError, match=r"parameter_server leases any data to any worker.*of 2 hosts"):
        assign_data(local(from_arrays(torch.arange(9))), plan, plan.roles[0], ThreadCollective(ThreadGroup(2), 0))


def test_a_run_on_one_host_is_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    data = from_arrays(images, labels).shuffle()

    def weights(pipeline: hr.data.Pipeline) -> torch.Tensor:
        job = hr.Job(
            model=lambda: torch.nn.Linear(4, 3),
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            data=pipeline,
            eval_data=pipeline,
            loss=torch.nn.functional.cross_entropy,
            global_batch_size=8,
            epochs=1,
        )
        model = hr.fit(job, hr.Mirrored(2)).model
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights(local(data)), weights(data))
