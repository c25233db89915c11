"""Which rank is on which node, and the cluster that a strategy plans for; no cluster is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import headrace as hr
from headrace.engine.ray.nodes import arrange, cluster_of, device_of, names_of, require_versions
from headrace.errors import UnfitMachine
from headrace.machine.identity import installed_versions
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import Plan, exchanges_in_host_memory
from headrace.strategies import Strategy

NAMES = {"1" * 8: "a", "2" * 8: "b", "3" * 8: "c"}


def told(node: str, gpus: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "node": node * 8,
        "address": f"10.0.0.{node}",
        "versions": installed_versions(),
        "cores": 8,
        "memory_bytes": 1 << 30,
        "gpus": list(gpus),
    }


def test_workers_of_a_node_follow_each_other_and_the_first_node_leads() -> None:
    places = arrange([told("2"), told("1"), told("2"), told("1")], NAMES, "1" * 8, workers=4)
    assert [place.host for place in places] == ["a", "a", "b", "b"]
    assert sorted(place.agent for place in places) == [0, 1, 2, 3]


def test_servers_take_turns_over_the_nodes() -> None:
    places = arrange([told("1"), told("2"), told("2"), told("3"), told("3")], NAMES, "1" * 8, workers=1)
    assert [place.host for place in places] == ["a", "b", "c", "b", "c"]


def test_the_cluster_has_the_cores_of_its_nodes_or_those_that_were_reserved() -> None:
    agents = [told("1"), told("1"), told("2"), told("2")]
    places = arrange(agents, NAMES, "1" * 8, workers=3)
    free, reserved = (cluster_of(places, agents, 3, cpus) for cpus in (None, 2))
    assert [(host.name, host.cores, host.ranks, host.address) for host in free.hosts] == [
        ("a", 8, (0, 1), "10.0.0.1"),
        ("b", 8, (2, 3), "10.0.0.2"),
    ]
    assert [host.cores for host in reserved.hosts] == [4, 2]
    assert (free.ranks, free.device) == (4, "cpu")


def planned(agents: list[dict[str, Any]], workers: int, strategy: Strategy) -> Plan:
    places = arrange(agents, NAMES, "1" * 8, workers)
    return strategy.plan(ModelSpec((ParameterSpec("weight", (4,)),)), cluster_of(places, agents, workers, None))


def test_ranks_of_a_node_see_all_its_gpus_in_their_order() -> None:
    agents = [told("1", ("3",)), told("1", ("5",)), told("1")]
    places = arrange(agents, NAMES, "1" * 8, workers=2)
    assert [place.gpus for place in places] == ["3,5"] * 3
    cluster = cluster_of(places, agents, 2, None)
    assert (cluster.device, cluster.hosts[0].accelerators) == ("cuda", ("cuda:0", "cuda:1"))
    plan = planned(agents, 2, hr.ParameterServer(2))
    assert [role.device for role in plan.roles] == ["cuda:0", "cuda:1", "cpu"]


def test_gpus_of_several_nodes() -> None:
    plan = planned([told("2", ("0",)), told("1", ("1",)), told("1", ("0",)), told("2", ("7",))], 4, hr.Mirrored(4))
    assert [(role.host, role.device) for role in plan.roles] == [
        *(("a", "cuda:0"), ("a", "cuda:1"), ("b", "cuda:0"), ("b", "cuda:1"))
    ]
    assert not exchanges_in_host_memory(replace(plan, trusted=True))


def test_workers_with_fractions_share_a_gpu_and_are_named() -> None:
    agents = [told("1", ("3",)), told("1", ("3",)), told("1", ("5",)), told("2", ("0",))]
    assert [place.gpus for place in arrange(agents, NAMES, "1" * 8, 4)] == ["3,5"] * 3 + ["0"]
    plan = planned(agents, 4, hr.Mirrored(4))
    assert [role.device for role in plan.roles] == ["cuda:0", "cuda:0", "cuda:1", "cuda:0"]
    assert exchanges_in_host_memory(replace(plan, trusted=True))
    served = planned([*agents, told("2")], 4, hr.ParameterServer(4))
    assert [role.device for role in served.roles] == ["cuda:0", "cuda:0", "cuda:1", "cuda:0", "cpu"]


def test_each_worker_is_given_its_own_part_of_a_gpu() -> None:
    plan = planned([told("1", ("MIG-a",)), told("1", ("MIG-b",))], 2, hr.Mirrored(2))
    assert [(role.device, role.identity) for role in plan.roles] == [("cuda:0", "MIG-a"), ("cuda:0", "MIG-b")]
    assert not exchanges_in_host_memory(plan)


def test_a_process_that_comes_back_calls_the_gpu_that_it_is_given_then_the_first() -> None:
    assert device_of(["5"], ["5"]) == ("cuda:0", "")
    assert device_of(["MIG-a"], ["MIG-a"]) == ("cuda:0", "MIG-a")
    assert device_of([], []) == ("cpu", "")


def node(key: str, name: str, address: str = "10.0.0.1", machine: str = "vm") -> dict[str, str]:
    return {"NodeID": key * 8, "NodeName": name, "NodeManagerAddress": address, "NodeManagerHostname": machine}


def test_nodes_have_the_names_that_they_were_given() -> None:
    assert names_of([node("1", "left"), node("2", "right")]) == {"1" * 8: "left", "2" * 8: "right"}


def test_nodes_without_a_name_have_that_of_their_machine_and_never_the_same() -> None:
    assert names_of([node("1", "10.0.0.1")]) == {"1" * 8: "vm"}
    assert names_of([node("1", "10.0.0.1"), node("2", "10.0.0.1")]) == {"1" * 8: "vm-111111", "2" * 8: "vm-222222"}


def test_another_version_on_a_node_is_refused_by_its_name() -> None:
    other = {**told("2"), "versions": {**installed_versions(), "torch": "1.0"}}
    require_versions([told("1")], NAMES)
    with pytest.raises(UnfitMachine, match=r"b has torch 1\.0, and this process .*; install the same on all nodes"):
        require_versions([told("1"), other], NAMES)
