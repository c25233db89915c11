import importlib.util
import os
import shutil
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from headrace.cli import checks
from headrace.cli.checks import CHECKS, Check, Verdict

BY_NAME: dict[str, Callable[[], Any]] = {check.__name__: check for check in CHECKS}


def lines(check: str) -> dict[str, Check]:
    return {line.name: line for line in BY_NAME[check]()}


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "safetensors", "sklearn", "numpy")
    assert lines("_torch")["torch"] == Check("torch", Verdict.PROBLEM, "not installed", "pip install torch==2.13.0")
    found = lines("_packages")
    assert found["packages"].verdict is Verdict.PROBLEM
    assert found["packages"].remedy == "pip install safetensors"
    assert found["numpy"].verdict is Verdict.PROBLEM
    assert found["sklearn"].verdict is Verdict.OK, "nobody needs it"


def fake_torch(monkeypatch: pytest.MonkeyPatch, version: str, devices: tuple[str, ...] = (), warn: str = "") -> None:
    def is_available() -> bool:
        if warn:
            import warnings

            warnings.warn(warn, stacklevel=1)
        return bool(devices)

    module = types.ModuleType("torch")
    module.__version__ = version  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_available=is_available, device_count=lambda: len(devices), get_device_name=devices.__getitem__
    )
    module.__spec__ = importlib.util.spec_from_loader("torch", None)
    monkeypatch.setitem(sys.modules, "torch", module)


def test_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, "2.13.0", ("NVIDIA A", "NVIDIA B"))
    assert lines("_torch")["accelerators"].found == "NVIDIA A, NVIDIA B"
    fake_torch(monkeypatch, "2.13.0+cpu", warn="the driver is too old")
    assert lines("_torch")["accelerators"].remedy == "update the driver"


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, "2.9.1+cu126")
    assert lines("_torch") == {
        "torch": Check("torch", Verdict.PROBLEM, "2.9.1+cu126, too old", "pip install torch==2.13.0")
    }


@pytest.mark.parametrize(
    ("allowed", "quota", "verdict", "words"),
    [
        (4, None, Verdict.OK, "4 usable"),
        (4, 1.5, Verdict.WARNING, "limited to the time of 1.5 by a control group"),
        (1, None, Verdict.WARNING, "1 usable"),
        (4, 8.0, Verdict.OK, "4 usable"),
    ],
)
def test_cores(
    allowed: int, quota: float | None, verdict: Verdict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "cores", lambda: allowed)
    monkeypatch.setattr(checks, "core_quota", lambda: quota)
    line = lines("_cores")["cores"]
    assert line.verdict is verdict
    assert words in line.found


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "spare_memory_bytes", lambda: 300_000_000)
    line = lines("_memory")["memory"]
    assert line.verdict is Verdict.WARNING
    assert line.found.startswith("300 MB free of")


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_shared_memory", lambda: "memfd_create: operation not permitted")
    usage = types.SimpleNamespace(free=64 << 20, total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = lines("_shared_memory")
    assert found["shared memory"].verdict is Verdict.PROBLEM
    assert found["shared memory"].found == "memfd_create: operation not permitted"
    assert found["/dev/shm"].verdict is Verdict.WARNING
    assert "67.1 MB free" in found["/dev/shm"].found


def test_a_full_and_an_unwritable_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 20, total=1 << 40))
    assert lines("_system")["disk"].verdict is Verdict.WARNING
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "not writable" in lines("_system")["disk"].found
