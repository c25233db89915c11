"""What is said of a torch that the tests did not run with, and of one that is too old."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.machine import versions

ROOT = Path(__file__).resolve().parents[2]


def test_the_bounds_of_the_package_are_what_the_tests_ran_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = [each for each in project["dependencies"] if re.match(r"torch\b", each)]
    oldest, newest = map(versions.minor_of, (versions.TESTED_TORCH[0], versions.TESTED_TORCH[-1]))
    assert torch == f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert f"pip install '{torch}'" == versions.TORCH_REMEDY
    assert project["requires-python"] == f">={versions.TESTED_PYTHON[0]}"


def test_versions_are_in_their_order() -> None:
    for known in (versions.TESTED_TORCH, versions.TESTED_PYTHON):
        minors = [versions.minor_of(each) for each in known]
        assert minors == sorted(set(minors))


@pytest.mark.parametrize("version", [*versions.TESTED_TORCH, "2.13.0+cpu", "2.12.0a0+git12ab", "2.15.7"])
def test_nothing_is_said_of_a_version_that_was_tested(version: str) -> None:
    assert not versions.too_old(version)
    assert not versions.untested(version)


@pytest.mark.parametrize("version", ["2.10.9", "1.13.1+cu117", "0.4"])
def test_an_older_one_is_too_old(version: str) -> None:
    assert versions.too_old(version) == (
        f"torch {version} is too old: 2.11.0 is the oldest that headrace takes: {versions.TORCH_REMEDY}"
    )
    assert not versions.untested(version)


@pytest.mark.parametrize("version", ["2.99.0", "3.0.0.dev20270101+cpu"])
def test_a_newer_one_was_not_tested(version: str) -> None:
    assert not versions.too_old(version)
    assert versions.untested(version).startswith(f"torch {version} is newer than {versions.TESTED_TORCH[-1]}, ")


def of_torch(folder: Path, version: str) -> dict[str, str]:
    """Returns the environment of a program that finds another version of torch in the installed packages' metadata."""
    metadata = folder / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n", encoding="utf-8")
    return {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}


def python(folder: Path, version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, where it finds that version of torch."""
    command = [sys.executable, *arguments]
    environment = of_torch(folder, version)
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


JOB = str(ROOT / "examples" / "digits" / "job.py")
TRAIN = ("-m", "headrace", "train", JOB, "--set", "epochs=1", "--workers", "1", "--strategy", "one_device")
COMPARE = (
    "-m",
    "headrace",
    "compare",
    JOB,
    "--set",
    "epochs=1",
    "--strategies",
    "one_device,mirrored",
    "--workers",
    "2",
)
SETUP = """
import torch, headrace as hr
model = torch.nn.Linear(1, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 1)))
hr.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
def test_below_the_floor_a_command_says_one_line(tmp_path: Path) -> None:
    done = python(tmp_path, "2.9.1", *TRAIN)
    assert done.returncode == 3
    assert done.stderr == (
        f"error: torch 2.9.1 is too old: 2.11.0 is the oldest that headrace takes: {versions.TORCH_REMEDY}\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize("arguments", [TRAIN, COMPARE, ("-c", SETUP)], ids=["train", "compare", "setup"])
def test_beyond_the_ceiling_a_run_trains_and_says_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = python(tmp_path, "2.99.0", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch 2.99.0 is newer than") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
def test_below_the_floor_a_script_says_it_too(tmp_path: Path) -> None:
    code = "import headrace as hr\ntry:\n    hr.OneDevice()\nexcept Exception as error:\n    print(repr(error))"
    done = python(tmp_path, "2.9.1", "-c", code)
    assert "UnfitMachine" in done.stdout
    assert "torch 2.9.1 is too old: 2.11.0 is the oldest that headrace takes" in done.stdout
