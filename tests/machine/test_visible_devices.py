"""Which devices the environment lets a process see: none of them, or parts of one."""

from __future__ import annotations

import os
import types

import pytest
import torch

import headrace as hr
from headrace import devices
from headrace.devices import DEVICES, DeviceKind, choose, explain_auto
from headrace.errors import UnfitMachine
from headrace.machine.identity import detect
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import exchanges_in_host_memory

MODEL = ModelSpec((ParameterSpec("weight", (4,)),))


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_devices_that_the_environment_hides(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    said = f"CUDA_VISIBLE_DEVICES='{value}' hides every CUDA device from this process"
    with pytest.raises(UnfitMachine, match=rf"^device='cuda' and {said}; unset it, or use device='cpu'$"):
        choose("cuda")
    assert said in explain_auto("cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "torch sees no CUDA device here" in explain_auto("cpu")


def test_each_worker_sees_its_own_part_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = [True]
    monkeypatch.setattr(torch, "fake", types.SimpleNamespace(is_initialized=lambda: begun[0]), raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="fake"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    kind = DeviceKind("fake", "fake device", "gloo", visible="FAKE_VISIBLE", part="MIG-")
    monkeypatch.setitem(DEVICES, "fake", kind)
    monkeypatch.setenv("FAKE_VISIBLE", "MIG-a,MIG-b")
    # torch counts one part, and would bind this process to it.
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: pytest.fail("asked"))
    plan = hr.Mirrored().plan(MODEL, detect("fake"))
    assert [(role.device, role.identity) for role in plan.roles] == [("fake:0", "MIG-a"), ("fake:0", "MIG-b")]
    assert not exchanges_in_host_memory(plan)
    named = hr.Mirrored().plan(MODEL, detect("fake:1,cpu,fake:1"))
    assert [(role.device, role.identity) for role in named.roles] == [
        ("fake:0", "MIG-b"),
        ("cpu", ""),
        ("fake:0", "MIG-b"),
    ]
    with pytest.raises(UnfitMachine, match="device 'fake:2' is not here: torch sees fake:0, fake:1"):
        detect("fake:2")
    monkeypatch.setattr(torch, "device", lambda name: types.SimpleNamespace(index=int(name[-1])))
    with pytest.raises(UnfitMachine, match=r"has begun to use a fake device, and the run gives it MIG-b: .* FAKE_VIS"):
        devices.use("fake:0", "MIG-b")
    begun[0] = False
    devices.use("fake:0", "MIG-b")
    assert os.environ["FAKE_VISIBLE"] == "MIG-b"
    # Already its own.
    begun[0] = True
    devices.use("fake:0", "MIG-b")
