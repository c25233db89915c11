"""`headrace profile`: what is asked for, the text and the file."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run
from headrace.prediction.calibration import Constants
from headrace.prediction.simulation.simulate import simulate
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import BatchProfile, ComputeProfile, LayerSpec
from headrace.spec.model import ModelSpec, ParameterSpec

Capture = pytest.CaptureFixture[str]

LAYERS = tuple(
    LayerSpec(name, (), 1 << 20, forward_s, 2 * forward_s, 100, 50)
    for name, forward_s in (("quick", 0.001), ("a_layer_with_" + "a_long_name" * 3, 0.003))
)
MODEL = ModelSpec(
    (ParameterSpec("weight", (1000, 500)),),
    name="Sequential",
    compute=ComputeProfile(
        (BatchProfile(1, 0.002, 0.003, 1000), BatchProfile(64, 0.005, 0.010, 64_000, LAYERS)),
        optimizer_s=0.004,
        fixed_s=0.001,
        spread=0.03,
        device="cpu",
        threads=2,
        accumulate_s=0.002,
    ),
    layers=LAYERS,
    flops_per_example=1e6,
    origin={"device": "cpu", "torch": "2.13.0", "disturbed": "others kept 2.0 of 2 cores busy"},
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, stage: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def profile(job: Any, **how: Any) -> ModelSpec:
        asked.update(how, job=job)
        how["say"]("forward of 1 examples")
        return MODEL

    module = types.ModuleType("headrace.api.model_profile")
    vars(module)["profile"] = profile
    monkeypatch.setitem(sys.modules, "headrace.api.model_profile", module)
    return asked


def test_what_it_says(asked: dict[str, Any], job_file: Path, capsys: Capture) -> None:
    assert run(["profile", "digits.py", "--threads", "2", "--batch-sizes", "1,8", "--seconds", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "digits: Sequential, 500k parameters (2.00 MB), cpu, 2 threads",
        "",
        "   batch     forward    backward        step    examples/s     activations",
        "       1     2.00 ms     3.00 ms     10.0 ms           100         1.00 kB",
        "      64     5.00 ms     10.0 ms     20.0 ms          3200         64.0 kB",
        "",
        "A step of 64 examples: forward 5.00 ms, backward 10.0 ms, the update 4.00 ms,",
        "everything else 1.00 ms; its time deviates by 3.0 %. Each micro-batch after the",
        "first takes 2.00 ms more, to add its gradients.",
        "Forward computes 1 MFLOP an example, here 12.8 GFLOP/s.",
        "",
        "2 slowest of 2 layers               forward   backward    part        parameters",
        "a_layer_with_a_long_namea_long…     3.00 ms    6.00 ms    75 %           1.05 MB",
        "quick                               1.00 ms    2.00 ms    25 %           1.05 MB",
        "all, each by itself                 4.00 ms    8.00 ms",
        "",
        "NOT IDLE: others kept 2.0 of 2 cores busy. The quickest steps count; profile",
        "again when nothing else runs.",
        "profile: digits.profile.json",
    ]
    assert max(map(len, out.splitlines())) <= 80
    assert err == "measuring forward of 1 examples\n"
    assert (asked["threads"], asked["batch_sizes"], asked["seconds"]) == (2, [1, 8], 3.0)
    assert ModelSpec.load("digits.profile.json") == MODEL


def test_the_result_as_json(asked: dict[str, Any], job_file: Path, capsys: Capture) -> None:
    assert run(["profile", "digits.py", "-o", "profiles/a.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == "profiles/a.json"
    assert found["compute"]["batches"][1]["backward_s"] == 0.010
    assert ModelSpec.load("profiles/a.json") == MODEL


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["digits.py", "--batch-sizes", "1,x"], 2, "--batch-sizes takes numbers of at least 1"),
        (["digits.py", "--batch-sizes", "0"], 2, "got '0'"),
        (["digit.py"], 2, "did you mean digits.py?"),
        (["digits.py", "-o", "digits.py/a.json"], 3, "the profile digits.py/a.json cannot be written"),
    ],
)
def test_what_cannot_be_meant(
    asked: dict[str, Any], job_file: Path, arguments: list[str], code: int, said: str, capsys: Capture
) -> None:
    assert run(["profile", *arguments]) == code
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_runs_beside_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    written = replace(MODEL, origin={})
    written.save("model.json")
    Path("cluster.toml").write_text(Cluster((Host("a", 4, 10**10), Host("b", 4, 10**10))).toml())
    slow = Constants(compute=2.0).model(written)
    for workers in (1, 2):
        simulate(slow, "cluster.toml", f"mirrored(workers={workers})", run_dir=f"runs/{workers}")
    asked = ["calibrate", "runs/1", "runs/2", "runs/3", "--model", "model.json", "--cluster", "cluster.toml"]
    assert run([*asked, "--out", "fitted"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["examples/s", "measured", "predicted", "error", "calibrated", "error"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert any(line.startswith("left out: runs/3: ") for line in lines)
    assert lines[-1] == "calibrated: fitted/model.json, fitted/cluster.toml"
    fitted = ModelSpec.load("fitted/model.json").compute
    assert fitted is not None
    assert fitted.batches[1].forward_s == pytest.approx(2 * 0.005, rel=0.1)
    assert run([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compute"] == pytest.approx(2.0, rel=0.1)
    assert [each["run"] for each in found["runs"]] == ["1", "2"]
    assert run([*asked[:4], "--model", "none.json", "--cluster", "cluster.toml"]) == 2
