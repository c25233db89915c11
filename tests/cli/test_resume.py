"""`headrace train --checkpoint-every --keep --resume --resume-from --reset-optimizer`."""

import json
import subprocess
from pathlib import Path

import pytest

from headrace.checkpoint import CheckpointFolder
from headrace.cli import run
from headrace.spec.options import Checkpoints
from warm.programs import programs

Capture = pytest.CaptureFixture[str]

JOB = """
import functools, torch, headrace as hr

def job(lr=0.1, epochs=2, width=1):
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(64, 4, generator=generator), torch.randn(64, width, generator=generator))
    return hr.Job(model=functools.partial(torch.nn.Linear, 4, width), task=hr.tasks.regression(),
                  optimizer=functools.partial(torch.optim.Adam, lr=lr), data=data, eval_data=data,
                  global_batch_size=8, epochs=epochs)
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Checkpoints()),
        (["--keep", "7"], Checkpoints(keep=7)),
        (["--checkpoint-every", "100"], Checkpoints(every_steps=100, every_s=None)),
        (["--checkpoint-every", "30s", "--keep", "1"], Checkpoints(every_s=30.0, keep=1)),
        (["--checkpoint-every", "0.5s"], Checkpoints(every_s=0.5)),
        (["--checkpoint-every", "0"], False),
        (["--copy-to", "s3://bucket/runs/a"], Checkpoints(copy_to="s3://bucket/runs/a")),
        (["--checkpoint-every", "0s"], False),
    ],
)
def test_when_to_save(stage, job_file: Path, arguments: list[str], expected: Checkpoints | bool) -> None:
    assert run(["train", "digits.py", *arguments]) == 0
    assert stage.asked["checkpoints"] == expected
    assert (stage.asked["resume"], stage.asked["reset_optimizer"]) == (False, False)


@pytest.mark.parametrize(
    ("arguments", "resume", "reset"),
    [
        (["--run-dir", "a", "--resume"], True, False),
        (["--run-dir", "a", "--resume-if-saved"], "if_saved", False),
        (["--run-dir", "a", "--resume-from", "b"], Path("b"), False),
        (["--run-dir", "a", "--resume-from", "s3://bucket/a"], "s3://bucket/a", False),
        (
            ["--resume-from", "b/checkpoints/step-00000100", "--reset-optimizer"],
            Path("b/checkpoints/step-00000100"),
            True,
        ),
    ],
)
def test_what_to_go_on_from(
    stage, job_file: Path, arguments: list[str], resume: bool | str | Path, reset: bool
) -> None:
    assert run(["train", "digits.py", *arguments]) == 0
    assert (stage.asked["resume"], stage.asked["reset_optimizer"]) == (resume, reset)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume goes on with a run: name it by --run-dir, or another one by --resume-from"),
        (["--run-dir", "a", "--resume", "--resume-from", "b"], "--resume-from with another run; give one of them"),
        (["--copy-to", "bucket/a"], "copy_to must be a URL, for example 's3://bucket/runs/a', got 'bucket/a'"),
        (["--copy-to", "s3://b/a", "--checkpoint-every", "0"], "--copy-to: --checkpoint-every 0 saves nothing"),
        (["--checkpoint-every", "soon"], "--checkpoint-every takes steps (100) or seconds (30s), got 'soon'"),
        (["--checkpoint-every", "1.5"], "--checkpoint-every takes steps (100) or seconds (30s), got '1.5'"),
        (["--checkpoint-every", "s"], "--checkpoint-every takes steps (100) or seconds (30s), got 's'"),
        (["--checkpoint-every", "-3"], "every_steps must be a whole number of at least 1, got -3"),
        (["--checkpoint-every", "-3s"], "every_s must be a number of seconds above 0, got -3.0"),
        (["--checkpoint-every", "nans"], "--checkpoint-every takes steps (100) or seconds (30s), got 'nans'"),
    ],
)
def test_what_cannot_be_meant(stage, job_file: Path, arguments: list[str], message: str, capsys: Capture) -> None:
    assert run(["train", "digits.py", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert stage.seen == []


def headrace(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [programs() / "headrace", "train", "job.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def steps(run_dir: Path) -> tuple[int, ...]:
    return CheckpointFolder(run_dir / "checkpoints").steps()


@pytest.mark.slow
def test_from_the_first_run_to_the_last(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    first = headrace(tmp_path, "--run-dir", "a", "--checkpoint-every", "5", "--keep", "2", "--set", "epochs=1")
    assert first.returncode == 0, first.stderr
    assert steps(tmp_path / "a") == (5, 8)

    again = headrace(tmp_path, "--run-dir", "a")
    assert again.returncode == 2
    assert "a holds a run already; name another run_dir, or delete it; resume=True (--resume)" in again.stderr

    other = headrace(tmp_path, "--run-dir", "a", "--resume", "--set", "width=2", "--json")
    assert other.returncode == 2
    error = json.loads(other.stdout)["error"]
    assert error["type"] == "CheckpointMismatch"
    assert "parameter weight is float32 [1, 4] in the checkpoint, float32 [2, 4] in the job" in error["message"]

    on = headrace(tmp_path, "--run-dir", "a", "--resume", "--strategy", "mirrored", "--workers", "2", "--json")
    assert on.returncode == 0, on.stderr
    assert f"goes on from {tmp_path / 'a' / 'checkpoints' / 'step-00000008'}" in on.stderr
    assert steps(tmp_path / "a") == (5, 8, 16)
    whole = headrace(tmp_path, "--run-dir", "b", "--json")
    assert json.loads(on.stdout)["metrics"] == pytest.approx(json.loads(whole.stdout)["metrics"], abs=1e-6)

    place = "a/checkpoints/step-00000008"
    elsewhere = headrace(tmp_path, "--run-dir", "c", "--resume-from", place, "--reset-optimizer", "--set", "lr=0.5")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert steps(tmp_path / "c") == (16,)


@pytest.mark.slow
def test_nothing_or_nothing_sound_to_resume(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    nothing = headrace(tmp_path, "--run-dir", "a", "--resume")
    assert nothing.returncode == 2
    assert f"there is nothing to resume from: {tmp_path / 'a'} does not exist" in nothing.stderr
    assert headrace(tmp_path, "--run-dir", "a", "--set", "epochs=1").returncode == 0
    (file,) = (tmp_path / "a" / "checkpoints").glob("step-*/rank-0.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    damaged = headrace(tmp_path, "--run-dir", "a", "--resume")
    assert damaged.returncode == 5
    assert f"{file}: " in damaged.stderr
