"""`headrace evaluate` prints what the run's own evaluation has found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import run

JOB = """
import functools, torch, headrace as hr
torch.manual_seed(0)
inputs, target = torch.rand(47, 6), torch.arange(47) % 3

class Noted(hr.Callback):
    def on_evaluation(self, moment, metrics):
        moment.log({"noted": metrics["test/accuracy"]})

def job(all_sets: bool = True):
    return hr.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)),
        task=hr.tasks.multiclass(3),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(inputs, target),
        eval_data={"val": (inputs[:20], target[:20]), "test": (inputs[20:], target[20:])} if all_sets else None,
        global_batch_size=8,
        epochs=2,
        callbacks=[Noted()],
    )
"""
Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_a_run_and_each_of_its_checkpoints(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "job.py").write_text(JOB)
    words = ["--strategy", "mirrored", "--workers", "2", "--checkpoint-every", "6", "--json"]
    assert run(["train", str(tmp_path / "job.py"), "--run-dir", str(tmp_path / "r"), *words]) == 0
    events = (tmp_path / "r" / "events" / "rank-0.jsonl").read_text().splitlines()
    seen = [json.loads(line) for line in events]
    first, last = [each["metrics"] for each in seen if each["kind"] == "evaluated"]
    assert [*first] == ["loss", "accuracy", "test/loss", "test/accuracy"]
    noted = [each["values"]["noted"] for each in seen if each["kind"] == "values_logged"]
    assert noted == [first["test/accuracy"], last["test/accuracy"]]
    capsys.readouterr()
    for path, step, wanted in (
        (tmp_path / "r", None, last),
        (tmp_path / "r" / "checkpoints" / "step-00000006", 6, first),
    ):
        assert run(["evaluate", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step"] == step
        assert found["metrics"] == pytest.approx(wanted, rel=1e-5)
    assert run(["evaluate", str(tmp_path / "r" / "checkpoints" / "step-00000006"), "--step", "6"]) == 2
    assert run(["evaluate", str(tmp_path / "r"), "--set", "all_sets=False"]) == 2
    assert "no eval_data" in capsys.readouterr().err


def test_a_run_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    assert run(["evaluate", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
