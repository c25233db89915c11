"""`headrace predict` prints what `run.predict` returns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.cli import run

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


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert run(["predict", str(tmp_path), "x.npy"]) == 2
    assert "is no run directory" in capsys.readouterr().err
