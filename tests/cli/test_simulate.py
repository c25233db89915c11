"""`headrace simulate` and `rehearse`: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import run
from headrace.spec.compute import BatchProfile, ComputeProfile
from headrace.spec.model import ModelSpec, ParameterSpec

JOB = """
import torch, headrace as hr
inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
job = hr.Job(model=lambda: torch.nn.Linear(4, 2), task=hr.tasks.multiclass(2),
             optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=(inputs, (inputs[:, 0] > 0).long()),
             eval_data=(inputs, (inputs[:, 0] > 0).long()), global_batch_size=16, epochs=2)
"""
Capture = pytest.CaptureFixture[str]
FILES = Path(__file__).resolve().parents[2] / "examples" / "simulate"
COMMAND = ["simulate", str(FILES / "model.toml"), "--cluster", str(FILES / "cluster.toml")]
QUICK = ["--assume", "steps=20"]


def test_a_text_for_people(capsys: Capture) -> None:
    assert run([*COMMAND, "--strategy", "parameter_server(workers=16,servers=1)", *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated   parameter_server, 16 workers, 1 server\n")
    assert "bottleneck  the server's network card" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_document_for_programs(capsys: Capture) -> None:
    assert run([*COMMAND, "--strategy", "mirrored", "--workers", "16", "--json", *QUICK]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["simulated"], document["workers"], document["global_batch_size"]) == (True, 16, 1024)
    assert 0 < document["efficiency"] < 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--assume", "network_shar=0.5"], "did you mean 'network_share'"),
        (["--assume", "network_share"], "--assume takes KEY=VALUE"),
        (["--assume", "network_share=fast"], "takes a number, got 'fast'"),
        (["--strategy", "miror"], "did you mean 'mirrored'"),
        (["--workers", "64"], "64 workers need as many devices, and the cluster has 32"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str, capsys: Capture) -> None:
    assert run([*COMMAND, *QUICK, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_lacks_something_is_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "model.toml").write_text("parameters = 5")
    assert run(["simulate", str(tmp_path / "model.toml"), *COMMAND[2:]]) == 2
    assert "model.toml: nothing says how long a step takes" in capsys.readouterr().err


def test_a_rehearsal_beside_one_process(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "job.py").write_text(JOB)
    model = tmp_path / "model.json"
    command = ["rehearse", str(tmp_path / "job.py"), "--model", str(model), "--run-dir"]
    layers = (ParameterSpec("weight", (2, 4)), ParameterSpec("bias", (2,)))
    ModelSpec(layers, compute=ComputeProfile((BatchProfile(8, 0.001, 0.002),), 0.0005, 0.0001)).save(model)
    asked = ["--strategy", "parameter_server", "--workers", "8"]
    assert run([*command, str(tmp_path / "a"), *asked]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["parameter_server,", "8", "workers", "one", "process"]
    assert "virtual time" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert run([*command, str(tmp_path / "b"), *asked, "--no-alone", "--json", "--seed", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rehearsed"], document["workers"], document["alone"]) == (True, 8, None)
    assert document["staleness"] > 1
    assert run([*command, str(tmp_path / "c"), "--strategy", "pipeline(stages=2)"]) == 2
    assert "cannot be rehearsed" in capsys.readouterr().err
