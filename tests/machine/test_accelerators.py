"""What is said of accelerators: what they are, what they lack, and that one has failed."""

from __future__ import annotations

import re
import types

import pytest
import torch

from headrace import devices
from headrace.devices import DEVICES, DeviceKind
from headrace.errors import RunFailed
from headrace.machine.accelerators import backend_version, device_title, explained_by_device, unlike


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be", "its hardware or driver"),
        ("Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)", "resume=True"),
        ("CUDA error: unspecified launch failure", "CUDA_LAUNCH_BLOCKING=1 shows the operation"),
        ("CUDA error: an illegal memory access was encountered", "a kernel went beyond its memory"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "another process has it for itself"),
    ],
)
def test_a_device_that_fails_is_named_with_its_rank_and_a_remedy(said: str, remedy: str) -> None:
    error = explained_by_device(RuntimeError(said), "cuda:1 (GPU-a)", "rank 1 on b")
    assert isinstance(error, RunFailed)
    assert str(error).startswith(f"cuda:1 (GPU-a) of rank 1 on b cannot be used: {said.splitlines()[0]}; ")
    assert remedy in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("uncorrectable ECC error"), MemoryError()])
def test_another_error_stays_what_it_is(error: Exception) -> None:
    assert explained_by_device(error, "cuda:1", "rank 1 on b") is error


def test_accelerators_that_are_not_alike_are_said_with_their_ranks() -> None:
    assert unlike(["A, 80 GB", "A, 80 GB"], False) == unlike(["A, 80 GB", ""], False) == ""
    assert unlike(["A, 80 GB", "A, 40 GB", "A, 80 GB"], False) == (
        "the workers' accelerators are not alike (ranks 0, 2: A, 80 GB; rank 1: A, 40 GB); equal shares wait for the "
        "slowest: balance='speed'"
    )
    assert unlike(["A", "B"], True).endswith("; their shares follow their speed")


def test_the_version_of_what_carries_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_version(DEVICES["cpu"]) == "of torch"
    assert backend_version(DEVICES["mps"]) == ""
    # A build of torch for CUDA has NCCL, also where there is no GPU.
    assert re.fullmatch(r"(\d+\.\d+\.\d+)?", backend_version(DEVICES["cuda"]))
    monkeypatch.setitem(DEVICES, "fake", DeviceKind("fake", "fake device", backend="gloo"))
    library = types.SimpleNamespace(version=lambda: (2, 21, 5))
    there = types.SimpleNamespace(gloo=library, get_device_name="Fake {}".format)
    monkeypatch.setattr(torch, "fake", there, raising=False)
    assert backend_version(devices.kind_of("fake")) == "2.21.5"
    assert device_title("fake:1") == "Fake 1"
    there.get_device_properties = lambda index: types.SimpleNamespace(total_memory=80e9)
    assert device_title("fake:1") == "Fake 1, 80 GB"
