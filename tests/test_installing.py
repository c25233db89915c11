"""The README's ways to install headrace, from nothing: each in an environment that is made for the test."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from warm.programs import PYTHON

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```python\n(.*?)```\n\n.*?```text\n(.*?)```", README, re.DOTALL)
PINNED = re.search(r"HEADRACE_TORCH:-(\S+?)}", (ROOT / "scripts" / "setup").read_text(encoding="utf-8"))

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("real_python")]

PLAIN_JOB = """
import torch, headrace as hr

torch.manual_seed(0)
x = torch.randn(60, 4)
job = hr.Job(
    model=lambda: torch.nn.Linear(4, 1),
    loss=lambda output, target: ((output - target) ** 2).mean(),
    optimizer=lambda parameters: torch.optim.SGD([each for _, each in parameters], lr=0.1),
    data=(x, x.sum(1, keepdim=True)),
    global_batch_size=20,
    epochs=8,
)
"""


@dataclass(frozen=True)
class Installed:
    """An environment, and an empty folder to work in."""

    programs: Path
    folder: Path

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Returns what a program of the environment prints on both streams; its exit code is `code`."""
        done = subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.folder,
            env=without_python(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout


def without_python() -> dict[str, str]:
    """Returns this environment without what leads Python to other packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def installed(tmp_path: Path, what: str) -> Installed:
    """Makes an environment with the CPU build of torch, installs headrace as the README says, and copies the jobs."""
    assert PINNED is not None
    environment, folder = tmp_path / "environment", tmp_path / "work"
    folder.mkdir()
    subprocess.run([PYTHON, "-m", "venv", str(environment)], check=True)
    made = Installed(environment / "bin", folder)
    made.run("python", "-m", "pip", "install", "--quiet", "--no-compile", PINNED[1])
    before = made.run("python", "-W", "ignore", "-c", "import torch; print(torch.__version__)")
    # A copy: the build writes beside its source.
    source = tmp_path / "source"
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, kept)):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    made.run("python", "-m", "pip", "install", "--quiet", "--no-compile", f"{source}{what}")
    assert made.run("python", "-W", "ignore", "-c", "import torch; print(torch.__version__)") == before
    assert "nvidia" not in made.run("python", "-m", "pip", "list")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return made


@pytest.fixture(scope="module")
def with_extras(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return installed(tmp_path_factory.mktemp("extras"), "[data,watch]")


def test_the_example_of_the_readme_prints_what_it_shows(with_extras: Installed) -> None:
    assert EXAMPLE is not None
    (with_extras.folder / "example.py").write_text(EXAMPLE[1], encoding="utf-8")
    said = with_extras.run("python", "example.py")
    assert [line for line in EXAMPLE[2].splitlines() if line not in said] == []


@pytest.fixture(scope="module")
def trained(with_extras: Installed) -> Installed:
    command = ("train", "examples/digits/job.py", "--strategy", "mirrored", "--workers", "2", "--run-dir", "runs/a")
    assert "accuracy" in with_extras.run("headrace", *command)
    return with_extras


@pytest.fixture
def watching(trained: Installed) -> Iterator[str]:
    command = [trained.programs / "headrace", "watch", "runs/a", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=trained.folder, env=without_python(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0]
                break
        else:
            pytest.fail("watch names no address")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def test_watch_shows_the_run(watching: str) -> None:
    with urllib.request.urlopen(watching, timeout=30) as page:
        assert page.status == 200
        assert b"headrace" in page.read()


def test_the_model_is_exported_and_predicts(trained: Installed) -> None:
    trained.run("headrace", "export", "runs/a", "-o", "exported", "--formats", "pt2")
    assert (trained.folder / "exported" / "model.pt2").is_file()


def test_doctor_finds_no_problem(with_extras: Installed) -> None:
    assert "problem" not in with_extras.run("headrace", "doctor")


def test_without_extras_jobs_train_and_what_needs_one_names_it(tmp_path: Path) -> None:
    plain = installed(tmp_path, "")
    (plain.folder / "job.py").write_text(PLAIN_JOB, encoding="utf-8")
    assert "model.safetensors" in plain.run("headrace", "train", "job.py", "--strategy", "mirrored", "--workers", "2")
    assert "pip install 'headrace[data]'" in plain.run("headrace", "train", "examples/digits/job.py", code=3)
    assert "pip install 'headrace[watch]'" in plain.run("headrace", "watch", "runs", code=3)


def test_setup_from_a_clone_makes_an_environment_and_trains(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    done = subprocess.run(
        ["scripts/setup"], cwd=clone, env=without_python(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = Installed(clone / ".venv" / "bin", clone)
    assert "accuracy" in made.run("headrace", "train", "examples/digits/job.py", "--set", "epochs=1")
    # Safe to run again, and at once.
    again = subprocess.run(
        ["scripts/setup"], cwd=clone, env=without_python(), capture_output=True, timeout=20, check=True
    )
    assert again.stderr == b""
