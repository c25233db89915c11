"""Workers on devices of several kinds: an accelerator whose memory the host cannot read, and CPUs.

The accelerator stays in a process for good, so the runs are those of programs of their own, `mixed_runs`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from engine.networks import MASTER, at, network
from engine.ranks import launcher
from headrace.testing.strategies import DOUBLE
from strategies.contract_models import COUNTS, Case, dense
from strategies.contract_runs import distance, train
from warm.programs import PYTHON

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here, which the fake accelerator needs"),
]

ROOT = Path(__file__).resolve().parents[2]


def begin(call: str, folder: Path, **more: str) -> subprocess.Popen[str]:
    """Starts a program that calls a function of `mixed_runs`."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)])
    command = [PYTHON, "-c", f"from strategies import mixed_runs; mixed_runs.{call}"]
    environment = {**os.environ, "PYTHONPATH": path, **more}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def answer(program: subprocess.Popen[str]) -> str:
    out, err = program.communicate(timeout=280)
    assert program.returncode == 0, err[-4000:]
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What came out of the runs, by the name of the case."""
    return json.loads(answer(begin("main()", tmp_path_factory.mktemp("mixed"))).splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("mirrored", ["fake:0", "cpu"]),
        ("mirrored from the CPU", ["cpu", "fake:1"]),
        ("two on one", ["fake:0", "fake:0", "cpu"]),
        ("on_nonfinite", ["fake:0", "cpu"]),
        ("synchronous servers", ["fake:0", "cpu"]),
        ("servers over tcp", ["fake:0", "cpu"]),
        ("averaging", ["fake:0", "cpu"]),
        ("diloco", ["fake:0", "cpu"]),
        ("easgd", ["fake:0", "cpu"]),
        ("averaged state", ["fake:0", "cpu"]),
        ("averaging through servers", ["fake:0", "cpu"]),
        ("sharded on one", ["fake:0"]),
        ("sharded over two", ["fake:0", "fake:0"]),
    ],
)
def test_numbers_are_those_of_cpus(found: Mapping[str, Any], name: str, devices: list[str]) -> None:
    run = found[name]
    assert run["devices"] == devices
    assert run["apart"] <= DOUBLE
    assert run["stepped"] == [*range(len(devices))]


def test_the_slower_device_gets_fewer_examples(found: Mapping[str, Any]) -> None:
    run = found["balanced"]
    assert run["apart"] <= DOUBLE
    # Every operation of the fake accelerator copies its tensors to the host and back.
    assert run["shares"][-1][0] < run["shares"][-1][1]
    assert sum(run["shares"][-1]) == 16


@pytest.mark.parametrize("name", ["asynchronous servers", "downpour", "own steps"])
def test_both_train_one_model_asynchronously(found: Mapping[str, Any], name: str) -> None:
    assert found[name]["stepped"] == [0, 1]
    assert found[name]["accuracy"] > 0.9


@pytest.mark.parametrize("name", ["resumed", "sharded and resumed"])
def test_a_run_goes_on_with_other_devices(found: Mapping[str, Any], name: str) -> None:
    assert found[name]["apart"] <= DOUBLE


def test_workers_are_replaced_and_join(found: Mapping[str, Any]) -> None:
    run = found["lost and joined"]
    assert sorted(run["started"][:2]) == [[0, "fake:0"], [1, "cpu"]]
    # The server is rank 2.
    assert run["started"][2:] == [[0, "fake:0"], [3, "fake:0"]]
    assert run["status"] == "interrupted"


def test_the_report_names_each_workers_device(found: Mapping[str, Any]) -> None:
    run = found["mirrored"]
    assert run["kinds"] == "fake, cpu"
    assert "2 workers on" in run["report"]
    assert "(fake:0, cpu)" in run["report"]
    assert run["answer"] == "Workers differ: rank 1 (cpu) computes for 200 ms a step, rank 0 (fake:0) 100 ms."


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "gossip",
            "gossip exchanges tensors among devices of one kind, and those of the workers are fake (coll",
        ),
        ("a pipeline", "InfeasiblePlan: pipeline "),
        ("fully sharded", "fully_sharded exchanges tensors among devices of one kind, "),
        ("sharded apart", "2 workers of fully_sharded exchange tensors between devices, and the device is fake (coll"),
        ("sharded threads", "UsageError: 2 workers of ThreadEngine share the thread in which torch runs backward on"),
        ("central storage", "central_storage exchanges tensors among devices of one kind, "),
        ("tensor parallel", "InfeasiblePlan: tensor_parallel "),
        ("hybrid", "InfeasiblePlan: hybrid "),
        ("tpu", "InfeasiblePlan: tpu exchanges tensors among devices of one kind"),
        ("half precision", "precision='fp16' is for GPUs, and the device is the CPU"),
        ("more workers", "device names 2 devices on "),
        ("not here", "UnfitMachine: device 'fake:7' is not here: torch sees fake:0, fake:1"),
        ("no number", "UsageError: device 'fake' has no number"),
    ],
)
def test_what_cannot_mix_is_refused(found: Mapping[str, Any], name: str, said: str) -> None:
    assert said in found[name]


@pytest.mark.net
def test_each_of_two_hosts_brings_its_own(tmp_path: Path) -> None:
    devices = ("fake:0", "cpu")
    with network(2, kind="m") as name:
        programs = [
            begin(f"on_a_host({device!r})", tmp_path, **at(name, host), **said)
            for host, (device, said) in enumerate(zip(devices, launcher(2, MASTER), strict=True))
        ]
        answers = [answer(program) for program in programs]
    told = [[json.loads(line) for line in each.splitlines() if line.startswith("{")] for each in answers]
    job = Case(dense).job(COUNTS["uneven"])
    one = [each.tolist() for each in hr.fit(job, engine=hr.ThreadEngine(), check=False).model.parameters()]
    for rank in told:
        assert [run["devices"] for run in rank] == [list(devices)] * 5
        for run in rank[:2]:
            assert apart(run["model"], one) <= DOUBLE
        averaged = train(job, hr.LocalSGD(2, period=2)).tensors
        assert apart(rank[3]["model"], [each.tolist() for each in averaged.values()]) <= DOUBLE
    # Bit for bit, also by a codec.
    assert [run["model"] for run in told[0]] == [run["model"] for run in told[1]]


def apart(one: list[Any], other: list[Any]) -> float:
    tensors = (
        {str(i): torch.tensor(each, dtype=torch.float64) for i, each in enumerate(every)} for every in (one, other)
    )
    return distance(*tensors)
