"""Which process of a host takes which device: by UUIDs, by the launcher's number of the process, by what each sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headrace as hr
from headrace.engine.torchrun.store import joined
from headrace.errors import InfeasiblePlan
from headrace.policies.own_devices import shared_devices
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import exchanges_in_host_memory
from headrace.strategies import Strategy

MODEL = ModelSpec((ParameterSpec("weight", (4,)),))


def sees(*uuids: str, world: int = 2, named: tuple[str, ...] = (), host: str = "a") -> Cluster:
    """What a process knows of its host that sees devices with these UUIDs; without one it is told to use a CPU."""
    names = tuple(f"cuda:{index}" for index in range(len(uuids)))
    one = Host(host, 8, 2**30, names, worker_devices=named, identities=uuids)
    return Cluster((one,), world, "cuda" if uuids else "cpu")


def planned(
    seen: list[Cluster], local: tuple[str, ...] = (), strategy: Strategy | None = None
) -> list[tuple[str, str]]:
    """The device of each worker and its UUID, by rank."""
    plan = (strategy or hr.Mirrored()).plan(MODEL, joined(seen, local))
    return [(role.device, role.identity) for role in plan.roles if role.computes]


def test_two_processes_that_each_call_their_own_device_the_first_have_two() -> None:
    # As under srun --gpus-per-task=1, and --gpu-bind=single:1.
    seen = [sees("GPU-a"), sees("GPU-b")]
    assert planned(seen) == [("cuda:0", "GPU-a"), ("cuda:0", "GPU-b")]
    assert not exchanges_in_host_memory(hr.Mirrored().plan(MODEL, joined(seen)))


def test_named_by_each_process_they_are_two_as_well() -> None:
    seen = [sees("GPU-a", named=("cuda:0",)), sees("GPU-b", named=("cuda:0",))]
    assert planned(seen) == [("cuda:0", "GPU-a"), ("cuda:0", "GPU-b")]
    assert not exchanges_in_host_memory(hr.Mirrored().plan(MODEL, joined(seen)))


def test_named_for_all_of_the_host_each_takes_the_name_of_its_place() -> None:
    seen = [sees("GPU-a", "", named=("cuda:0", "cpu")), sees("GPU-b", "", named=("cuda:0", "cpu"))]
    assert planned(seen) == [("cuda:0", "GPU-a"), ("cpu", "")]


def test_a_device_that_is_shared_is_shared_by_its_uuid_where_it_is_named() -> None:
    seen = [sees("GPU-a", named=("cuda:0",)), sees("GPU-b", named=("cuda:0",)), sees("GPU-a", named=("cuda:0",))]
    seen = [replace(each, ranks=3) for each in seen]
    assert planned(seen) == [("cuda:0", "GPU-a"), ("cuda:0", "GPU-b"), ("cuda:0", "GPU-a")]
    assert exchanges_in_host_memory(hr.Mirrored().plan(MODEL, joined(seen)))


def test_else_it_is_refused_with_both_ranks() -> None:
    with pytest.raises(
        InfeasiblePlan,
        match=r"^rank 0 on a and rank 1 on a have one CUDA device, cuda:0 \(GPU-a\); start one process for each .*"
        r"device=\['cuda:0'\], and they share it, through host memory$",
    ):
        # The third process keeps the two from seeing the same.
        planned([sees("GPU-a", world=3), sees("GPU-a", world=3), sees("GPU-b", world=3)])


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (("0", "1"), ["GPU-a", "GPU-b"]),
        (("1", "0"), ["GPU-b", "GPU-a"]),
        (("", ""), ["GPU-a", "GPU-b"]),
        (("1", "1"), ["GPU-a", "GPU-b"]),
        (("0", "7"), ["GPU-a", "GPU-b"]),
        (("2", "1"), ["GPU-c", "GPU-b"]),
    ],
)
def test_where_all_see_the_same_the_launchers_number_says_which(local: tuple[str, ...], expected: list[str]) -> None:
    found = planned([sees("GPU-a", "GPU-b", "GPU-c")] * 2, local)
    assert [identity for _, identity in found] == expected
    assert [name for name, _ in found] == [f"cuda:{'abc'.index(each[-1])}" for each in expected]


@pytest.mark.parametrize("seen", [("tpu",), ("tpu", "tpu")])
def test_devices_that_each_process_calls_by_one_name_are_its_own(seen: tuple[str, ...]) -> None:
    """As TPUs are, which have no number: each process of a launcher has one."""
    host = Cluster((Host("a", 4, 2**30, seen),), 2, "tpu")
    plan = hr.TPU().plan(MODEL, joined([host, host], ("0", "1")))
    assert [role.device for role in plan.roles] == ["tpu", "tpu"]
    assert shared_devices(plan) == []
    assert not exchanges_in_host_memory(plan)


def test_a_device_that_fewer_see_is_theirs() -> None:
    # CUDA_VISIBLE_DEVICES=0,1 for the first, and 0 for the second.
    assert planned([sees("GPU-a", "GPU-b"), sees("GPU-a")]) == [("cuda:1", "GPU-b"), ("cuda:0", "GPU-a")]


def test_a_process_without_a_device_may_be_a_server_and_no_worker() -> None:
    seen = [sees("GPU-a", world=3), sees("GPU-b", world=3), sees(world=3)]
    assert planned(seen, strategy=hr.ParameterServer()) == [("cuda:0", "GPU-a"), ("cuda:0", "GPU-b")]
    with pytest.raises(InfeasiblePlan, match=r"^rank 0 on a sees no CUDA device, and mirrored computes on cuda "):
        planned([sees(), sees("GPU-a")])
    with pytest.raises(InfeasiblePlan, match=r"^rank 1 on a sees no CUDA device, .* \(srun --gpus-per-task=1, a lim"):
        planned([sees("GPU-a"), sees()])


def test_more_workers_than_devices_are_refused_with_what_lets_them_share() -> None:
    with pytest.raises(
        InfeasiblePlan,
        match=r"asks for 3 workers on cuda and a has 2 such devices; use workers=2 or device='cpu', or name the device "
        r"of each, device=\['cuda:0', 'cpu'\]: workers that share one exchange through host memory",
    ):
        planned([sees("GPU-a", "GPU-b", world=3)] * 3)


def test_without_uuids_names_say_which_device_it_is() -> None:
    seen = [Cluster((Host("a", 8, 2**30, ("xpu:0", "xpu:1")),), 2, "xpu")] * 2
    assert planned(seen, ("1", "0")) == [("xpu:1", ""), ("xpu:0", "")]
