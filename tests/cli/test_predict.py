"""`headrace predict` prints what `run.predict` returns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.cli import run
from headrace.cli.commands.saved.job_of_run import job_of_run
from headrace.export import signature
from headrace.spec.job import JobSource
from serving.folders import looked_up, scaled, signed

JOB = """
import functools, torch, headrace as hr
torch.manual_seed(0)
job = hr.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3)),
    task=hr.tasks.multiclass(3),
    optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    data=(torch.rand(16, 2, 3), torch.arange(16) % 3),
    global_batch_size=8,
    steps=2,
)
"""
Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_predictions_of_a_run_and_of_its_export(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "job.py").write_text(JOB)
    assert run(["train", str(tmp_path / "job.py"), "--run-dir", str(tmp_path / "r")]) == 0
    values = np.random.default_rng(0).random((150, 2, 3))
    np.save(tmp_path / "x.npy", values)
    saved = load_file(tmp_path / "r" / "model.safetensors")
    weight, bias = (next(value for name, value in saved.items() if name.endswith(each)) for each in ("weight", "bias"))
    wanted = torch.softmax(torch.from_numpy(values).float().flatten(1) @ weight.T + bias, 1)
    assert run(["export", str(tmp_path / "r"), "-o", str(tmp_path / "m"), "--formats", "pt2"]) == 0
    capsys.readouterr()
    for model in ("r", "m"):
        assert run(["predict", str(tmp_path / model), str(tmp_path / "x.npy")]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["class"] for row in rows] == wanted.argmax(1).tolist()
        assert torch.allclose(torch.tensor([row["output"] for row in rows]), wanted, atol=1e-6)
    command = ["predict", str(tmp_path / "m"), str(tmp_path / "x.npy"), "-o", str(tmp_path / "y.npz")]
    assert run(command) == 0
    assert np.allclose(np.load(tmp_path / "y.npz")["output"], wanted, atol=1e-6)
    capsys.readouterr()
    assert run(command) == 2
    assert "takes a new file" in capsys.readouterr().err
    np.save(tmp_path / "x.npy", values[:, :, :2])
    assert run(["predict", str(tmp_path / "r"), str(tmp_path / "x.npy")]) == 5
    assert "expected input float32 (any, 2, 3), got the shape (150, 2, 2)" in capsys.readouterr().err


def test_a_setting_that_is_given_replaces_that_one_of_the_run(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = JobSource(str(job_file), ("lr=0.5", "name=fine", "options.accumulate=4"))
    monkeypatch.setattr("headrace.api.exporting.source_of", lambda run: source)

    def settings(*given: str, of: Path | None = None) -> tuple[float, str, int]:
        job = job_of_run(Path("a"), of, given, otherwise="")
        return job.data[0], job.data[1], job.options.accumulate

    assert settings() == (0.5, "fine", 4)
    assert settings("lr = 0.25") == (0.25, "fine", 4)
    assert settings("lr=0.25", of=job_file) == (0.25, "plain", 1)


OUTPUTS = """
import functools, torch, headrace as hr

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.also = "none"

    def forward(self, x):
        y = self.layer(x)
        more = {"none": {}, "mean": {"mean": y.mean()}, "pairs": {"pairs": y @ y.T}}
        return {"y": y.bfloat16(), **more[self.also]}

def make(also="none"):
    made = Model()
    made.also = also
    return made

def job(also: str = "none"):
    return hr.Job(
        model=functools.partial(make, also),
        loss=lambda output, y: ((output["y"].float().sum(1) - y) ** 2).mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(torch.rand(16, 4), torch.rand(16)),
        global_batch_size=8,
        steps=2,
    )
"""


@pytest.mark.slow
def test_outputs_that_are_not_one_for_each_example_are_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "job.py").write_text(OUTPUTS)
    assert run(["train", str(tmp_path / "job.py"), "--run-dir", str(tmp_path / "r")]) == 0
    np.save(tmp_path / "x.npy", np.ones((40, 4)))
    capsys.readouterr()
    assert run(["predict", str(tmp_path / "r"), str(tmp_path / "x.npy")]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(row["y"]) for row in rows] == [2] * 40
    for also, told in (
        ("mean", "the output 'mean' has the shape () for 32 examples, and not one entry for each"),
        ("pairs", "the output 'pairs' has the shapes (32, 32) and (8, 8) for 32 and 8 examples"),
    ):
        assert run(["predict", str(tmp_path / "r"), str(tmp_path / "x.npy"), "--set", f"also={also}"]) == 5
        error = capsys.readouterr().err
        assert told in error
        assert "a method exported()" in error


def test_what_an_exported_model_does_not_compute_is_said(tmp_path: Path, capsys: Capture) -> None:
    values = np.zeros((40, 3), np.float32)
    values[33, 1] = np.nan
    np.save(tmp_path / "x.npy", values)
    assert run(["predict", str(scaled(tmp_path / "a", 2.0)), str(tmp_path / "x.npy")]) == 5
    told = "the model returned NaN or infinity in y for 1 of 40 examples, the first at 33"
    assert told in capsys.readouterr().err
    np.savez(tmp_path / "x.npz", user=np.arange(5), item=np.array([0, 1, 2, 10, 3]))
    assert run(["predict", str(looked_up(tmp_path / "b")), str(tmp_path / "x.npz")]) == 5
    captured = capsys.readouterr()
    assert "the model cannot compute examples 0 to 4" in captured.err
    assert "out of data bounds, idx=10" in captured.err
    assert captured.out == ""


def test_an_exported_folder_that_is_forged_is_refused(tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3), np.float32))
    folder = scaled(tmp_path / "a", 2.0)
    facts = signature.read(folder)
    (folder / "model.onnx").write_bytes(b"no model")
    (folder / "model.pt2").write_bytes(b"no model")
    command = ["predict", str(folder), str(tmp_path / "x.npy")]
    assert run(command) == 5
    assert "is not the file that was exported" in capsys.readouterr().err
    for told in ("model.onnx cannot be run: InvalidProtobuf", "model.pt2 cannot be loaded"):
        signed(folder, facts)
        assert run(command) == 5
        captured = capsys.readouterr()
        assert told in captured.err
        assert "Traceback" not in captured.err
        (folder / told.split()[0]).rename(tmp_path / told.split()[0])
    (folder / "model.onnx").symlink_to(tmp_path / "model.onnx")
    signed(folder, facts)
    assert run(command) == 5
    assert "is a link" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert run(["predict", str(tmp_path), "x.npy"]) == 2
    assert "is no run directory" in capsys.readouterr().err
