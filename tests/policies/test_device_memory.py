"""What a plan needs of the memory of devices, and of hosts that have some."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import pytest

import headrace as hr
from headrace.devices import DEVICES
from headrace.errors import InfeasiblePlan
from headrace.machine import accelerators
from headrace.machine.accelerators import memories
from headrace.prediction.device_memory import require_device_memory
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec, ParameterSpec

GB = 10**9


def model(parameters: int, copies: int = 4) -> ModelSpec:
    return ModelSpec((ParameterSpec("weight", (parameters,)),), copies=copies)


def gpus(count: int, memory_gb: int, host_gb: int = 256) -> Cluster:
    devices = tuple(f"cuda:{index}" for index in range(count))
    return Cluster((Host("a", 64, host_gb * GB, devices, device_memory_bytes=memory_gb * GB),), None, "cuda")


@pytest.mark.parametrize(
    "strategy", [hr.Mirrored(8), hr.Gossip(8), hr.ParameterAveraging(8), hr.TensorParallel(8), hr.ParameterServer(8, 1)]
)
def test_what_lies_on_devices_is_no_host_memory(strategy: hr.Strategy) -> None:
    # 12 GB of parameters: eight workers hold 8 x 4 x 12 GB on their devices, and build 8 x 12 GB on the host.
    plan = strategy.plan(model(3 * 10**9), gpus(8, 80, 120))
    assert plan.workers == 8
    with pytest.raises(InfeasiblePlan, match=r"needs (96|108),000,000,000 bytes of host memory .* has 90,000,000,000"):
        strategy.plan(model(3 * 10**9), gpus(8, 80, 90))


def test_on_cpus_all_of_it_is() -> None:
    host = Cluster((Host("a", 64, 256 * GB),))
    with pytest.raises(InfeasiblePlan, match=r"needs 300,000,000,000 bytes of host memory"):
        hr.Mirrored(8).plan(model(3 * 10**9), host)


def test_workers_on_both_need_both() -> None:
    devices = ("cuda:0", "cpu")
    host = Host("a", 64, 59 * GB, devices[:1], worker_devices=devices)
    # Three copies and half of the sum on the CPU's side, and the model that is built for the device: 42 + 12 GB.
    assert hr.Mirrored(2).plan(model(3 * 10**9), Cluster((host,), None, "cuda")).workers == 2
    poor = Cluster((Host("a", 64, 53 * GB, devices[:1], worker_devices=devices),), None, "cuda")
    with pytest.raises(InfeasiblePlan, match=r"needs 54,000,000,000 bytes of host memory"):
        hr.Mirrored(2).plan(model(3 * 10**9), poor)


def test_what_does_not_fit_on_a_device_is_refused_with_numbers() -> None:
    wanted, cluster = model(3 * 10**9), gpus(2, 40)
    plan = hr.Mirrored(2).plan(wanted, cluster)
    with pytest.raises(
        InfeasiblePlan,
        match=r"mirrored needs 48,000,000,000 bytes on cuda:0 of a for .* it has 40,000,000,000: 8,000,000,000 too "
        r"few, before any activations; use fully_sharded, .* \(2 devices or more\)",
    ):
        require_device_memory(plan, wanted, cluster)
    require_device_memory(plan, wanted, gpus(2, 48))
    # Where it is not known, nothing is refused.
    require_device_memory(plan, wanted, gpus(2, 0))


def test_what_servers_or_the_host_keep_is_not_on_a_device() -> None:
    wanted, cluster = model(3 * 10**9), gpus(2, 24)
    for strategy in (hr.ParameterServer(2, 1), hr.CentralStorage(2)):
        require_device_memory(strategy.plan(wanted, cluster), wanted, cluster)
        with pytest.raises(InfeasiblePlan, match=r"needs 24,000,000,000 bytes on cuda:0 of a"):
            require_device_memory(strategy.plan(wanted, cluster), wanted, gpus(2, 23))


def test_frozen_parameters_have_no_gradients() -> None:
    parameters = (ParameterSpec("big", (4 * 10**9,), trainable=False), ParameterSpec("small", (10**9,)))
    wanted, cluster = ModelSpec(parameters, copies=4), gpus(1, 32)
    require_device_memory(hr.OneDevice().plan(wanted, cluster), wanted, cluster)
    with pytest.raises(InfeasiblePlan, match=r"needs 32,000,000,000 bytes on cuda:0"):
        require_device_memory(hr.OneDevice().plan(wanted, cluster), wanted, gpus(1, 31))


def test_workers_that_share_a_device_need_it_together() -> None:
    wanted, shared = model(10**9), ("cuda:0", "cuda:0")
    host = Host("a", 8, 64 * GB, shared[:1], worker_devices=shared, device_memory_bytes=20 * GB)
    cluster = Cluster((host,), None, "cuda")
    with pytest.raises(InfeasiblePlan, match=r"needs 32,000,000,000 bytes on cuda:0 .* of each of 2 workers"):
        require_device_memory(hr.Mirrored(2).plan(wanted, cluster), wanted, cluster)


class Library:
    """NVIDIA's management library, of a machine with some GPUs."""

    def __init__(self, found: Mapping[str, int], begins: bool = True) -> None:
        self._names = list(found)
        self._found = found
        self._begins = begins
        self.ended = 0

    def nvmlInit_v2(self) -> int:
        return 0 if self._begins else 9

    def nvmlShutdown(self) -> int:
        self.ended += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._names)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        if index.value >= len(self._names):
            return 2
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        if name.decode() not in self._names:
            return 6
        handle._obj.value = self._names.index(name.decode()) + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        assert handle.value is not None
        memory._obj.total = self._found[self._names[handle.value - 1]]
        return 0


MACHINE = {"GPU-a": 80 * GB, "GPU-b": 24 * GB, "MIG-c": 10 * GB}


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, (80 * GB, 24 * GB, 10 * GB)),
        ("", ()),
        ("1", (24 * GB,)),
        ("1,0", (24 * GB, 80 * GB)),
        ("GPU-b, MIG-c", (24 * GB, 10 * GB)),
        ("7", ()),
        ("GPU-x", ()),
    ],
)
def test_a_process_sees_the_memory_of_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: tuple[int, ...]
) -> None:
    library = Library(MACHINE)
    monkeypatch.setattr(accelerators.ctypes, "CDLL", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memories(DEVICES["cuda"]) == found
    assert library.ended == 1
    assert memories(DEVICES["xpu"]) == ()


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(accelerators.ctypes, "CDLL", missing)
    assert memories(DEVICES["cuda"]) == ()
    monkeypatch.setattr(accelerators.ctypes, "CDLL", lambda name: Library({}, begins=False))
    assert memories(DEVICES["cuda"]) == ()
