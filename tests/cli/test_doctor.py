import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run
from headrace.cli.commands.doctor import CHECKS, Check, Verdict, examine, worst
from headrace.machine.extras import lacks, require_extra, requirements
from headrace.machine.versions import TESTED_TORCH, TORCH_REMEDY

# The package names its command `doctor`, too, which hides the module.
DOCTOR = sys.modules["headrace.cli.commands.doctor"]
BY_NAME: dict[str, Callable[[], Any]] = {check.__name__: check for check in CHECKS}


@pytest.fixture(autouse=True)
def _without_ports_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What listens is the machine's, and test_listening.py opens ports that are problems."""
    monkeypatch.setattr(DOCTOR, "listeners", list)


def lines(check: str) -> dict[str, Check]:
    return {line.name: line for line in BY_NAME[check]()}


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch")
    assert lines("_torch")["torch"] == Check("torch", Verdict.PROBLEM, "not installed", TORCH_REMEDY)
    versions = {"pyzmq": None, "rich": "12.0"}
    monkeypatch.setattr("headrace.machine.extras.installed", lambda name: versions.get(name, "99"))
    monkeypatch.setattr("headrace.machine.extras.find_spec", lambda name: None)
    found = "pyzmq>=26 (not installed), rich>=13 (installed is 12.0)"
    assert lines("_packages") == {
        "packages": Check("packages", Verdict.PROBLEM, found, "pip install 'pyzmq>=26' 'rich>=13'")
    }


def test_a_tree_that_is_not_installed_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("headrace.machine.extras.distribution", missing)
    assert lines("_packages") == lines("_extras") == {}
    require_extra("watch", "the page")


def test_the_module_of_another_package_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.machine.extras.installed", lambda name: None)
    there = importlib.machinery.ModuleSpec("cv2", None, origin="cv2.so")
    monkeypatch.setattr("headrace.machine.extras.find_spec", lambda name: there if name == "cv2" else None)
    assert "opencv-python-headless" not in str([*map(str, lacks(requirements("data")))])
    assert "simplejpeg>=1.8 (not installed)" in [*map(str, lacks(requirements("data")))]


def fake_torch(monkeypatch: pytest.MonkeyPatch, version: str, devices: tuple[str, ...] = (), warn: str = "") -> None:
    def is_available() -> bool:
        if warn:
            import warnings

            warnings.warn(warn, stacklevel=1)
        return bool(devices)

    module = types.ModuleType("torch")
    module.__version__ = version  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        get_device_name=devices.__getitem__, get_device_properties=lambda index: types.SimpleNamespace(total_memory=8e9)
    )
    module.accelerator = types.SimpleNamespace(  # type: ignore[attr-defined]
        current_accelerator=lambda: types.SimpleNamespace(type="cuda"),
        device_count=lambda: len(devices),
        is_available=is_available,
    )
    module.__spec__ = importlib.util.spec_from_loader("torch", None)
    monkeypatch.setitem(sys.modules, "torch", module)


def test_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_torch(monkeypatch, "2.13.0", ("NVIDIA A", "NVIDIA A"))
    assert lines("_torch")["accelerators"].found == "2 x NVIDIA A, 8 GB"
    assert lines("_torch")["accelerators"].verdict is Verdict.OK
    # This torch has no NCCL.
    assert lines("_torch")["collectives"].found.startswith("torch is built without nccl, by which workers on several")
    fake_torch(monkeypatch, "2.13.0", ("NVIDIA A", "NVIDIA B"))
    assert lines("_torch")["accelerators"].found == "1 x NVIDIA A, 8 GB; 1 x NVIDIA B, 8 GB"
    assert "Mirrored(balance='speed')" in lines("_torch")["accelerators"].remedy
    fake_torch(monkeypatch, "2.13.0+cpu", warn="the driver is too old")
    assert lines("_torch")["accelerators"].remedy == "update the driver"


def test_accelerators_that_the_environment_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, "2.13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first = next(line for line in BY_NAME["_torch"]() if line.name == "accelerators")
    said = "CUDA_VISIBLE_DEVICES='' hides every CUDA device from this process"
    assert (first.verdict, first.found) == (Verdict.WARNING, said)
    assert first.remedy == "unset CUDA_VISIBLE_DEVICES to use them"


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, "2.9.1+cu126")
    assert lines("_torch") == {"torch": Check("torch", Verdict.PROBLEM, "2.9.1+cu126, too old", TORCH_REMEDY)}


def test_a_torch_that_the_tests_did_not_run_with(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, "99.0.0+cu990")
    line = lines("_torch")["torch"]
    assert line.verdict is Verdict.WARNING
    assert line.found.startswith("99.0.0+cu990; the tests ran with 2.11.0, ")
    fake_torch(monkeypatch, TESTED_TORCH[-1])
    assert lines("_torch")["torch"].verdict is Verdict.OK


def test_a_processor_without_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert lines("_processor")["processor"].verdict is Verdict.OK
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    assert lines("_processor")["processor"].verdict is Verdict.WARNING
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert lines("_processor")["processor"].verdict is Verdict.OK


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
    monkeypatch.setattr(DOCTOR, "cores", lambda: allowed)
    monkeypatch.setattr(DOCTOR, "core_quota", lambda: quota)
    line = lines("_cores")["cores"]
    assert line.verdict is verdict
    assert words in line.found


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR, "spare_memory_bytes", lambda: 300_000_000)
    line = lines("_memory")["memory"]
    assert line.verdict is Verdict.WARNING
    assert line.found.startswith("300 MB free of")


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headrace.shared_memory.control_page.check_shared_memory", lambda: "memfd_create: operation not permitted"
    )
    usage = types.SimpleNamespace(free=64 << 20, total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = lines("_shared_memory")
    assert found["shared memory"].verdict is Verdict.PROBLEM
    assert found["shared memory"].found == "memfd_create: operation not permitted"
    assert found["/dev/shm"].verdict is Verdict.WARNING
    assert "67.1 MB free" in found["/dev/shm"].found


def test_shared_memory_where_torch_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.shared_memory.control_page", None)
    (line,) = lines("_shared_memory").values()
    assert (line.verdict, line.remedy) == (Verdict.PROBLEM, TORCH_REMEDY)
    assert line.found.startswith("not checked: ")


def test_a_full_and_an_unwritable_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 20, total=1 << 40))
    assert lines("_system")["disk"].verdict is Verdict.WARNING
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "not writable" in lines("_system")["disk"].found


Capture = pytest.CaptureFixture[str]

OK = Check("python", Verdict.OK, "3.11.7")
WARNING = Check("cores", Verdict.WARNING, "1 usable of 1", "give more cores")
PROBLEM = Check("torch", Verdict.PROBLEM, "not installed", TORCH_REMEDY)


def say(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    monkeypatch.setattr(DOCTOR, "examine", lambda: list(checks))


@pytest.mark.parametrize(("checks", "code"), [((OK,), 0), ((OK, WARNING), 0), ((WARNING, PROBLEM, OK), 3)])
def test_only_a_problem_fails(checks: tuple[Check, ...], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, *checks)
    assert run(["doctor"]) == code


def test_a_line_has_a_verdict_and_a_remedy(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    say(monkeypatch, OK, PROBLEM)
    run(["doctor"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["ok", "python", "3.11.7"],
        ["problem", "torch", "not", "installed"],
        ["->", *TORCH_REMEDY.split()],
    ]


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    say(monkeypatch, OK, WARNING)
    run(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "warning"
    assert result["checks"][1] == {
        "name": "cores",
        "verdict": "warning",
        "found": "1 usable of 1",
        "remedy": "give more cores",
    }


def test_the_worst_counts() -> None:
    assert worst([]) is Verdict.OK
    assert worst([OK, PROBLEM, WARNING]) is Verdict.PROBLEM
    assert worst([WARNING, OK]) is Verdict.WARNING


@pytest.mark.slow
def test_this_machine() -> None:
    found = {check.name: check for check in examine()}
    assert {"python", "torch", "accelerators", "packages", "extras", "cores", "memory", "shared memory", "disk"} <= set(
        found
    )
    assert found["torch"].verdict is Verdict.OK
    assert all(check.remedy for check in found.values() if check.verdict is not Verdict.OK)
    assert [check for check in found.values() if check.verdict is Verdict.PROBLEM] == []


JOB = """
import functools
import torch
import headrace as hr

def loss(output, target):
    return torch.nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))

def job(features: int = 3):
    data = (torch.randn(16, features), torch.zeros(16))
    return hr.Job(functools.partial(torch.nn.Linear, 3, 3), functools.partial(torch.optim.SGD, lr=0.1), data, 8,
                  loss=loss, steps=1)
"""


@pytest.mark.slow
def test_a_job_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.py").write_text(JOB)
    assert run(["doctor", str(tmp_path / "job.py"), "--json"]) == 0
    checks = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "job"]
    assert [check["verdict"] for check in checks] == ["ok", "warning"]
    assert "12 trained parameters, 16 examples" in checks[0]["found"]
    assert "the loss: that of a batch of 8 examples" in checks[1]["found"]
    assert "hr.Mean" in checks[1]["remedy"]
    assert run(["doctor", str(tmp_path / "job.py"), "--set", "features=4", "--json"]) == 3
    *_, last = json.loads(capsys.readouterr().out)["checks"]
    assert last["verdict"] == "problem"
    assert "the model cannot be run on data" in last["found"]
