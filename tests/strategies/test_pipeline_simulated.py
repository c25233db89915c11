"""Pipelines on simulated devices: the numbers of one device, and nothing read from a device in a step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.victims import NOTICED_S
from headrace.pipeline.schedules import SCHEDULES
from headrace.testing.strategies import DOUBLE
from simulated.cluster import on_hosts

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here, which the simulated accelerator needs"),
]


def ran(call: str, folder: Path, hosts: int = 1, devices: int = 2) -> dict[str, Any]:
    """Returns what a function of `staged_runs` says of its runs, by their names."""
    program = f"from simulated import nccl\nfrom strategies import staged_runs\nstaged_runs.{call}"
    ended = on_hosts(program, folder, hosts, devices)
    assert not any(ended.codes), ended.errors
    assert not any(counters["faults"] for counters in ended.counters.values())
    return {run["name"]: run for run in ended.said[0]}


@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_is_one_device_and_reads_nothing(stages: int, tmp_path: Path) -> None:
    found = ran(f"schedules({stages})", tmp_path, devices=stages)
    assert sorted(found) == sorted(SCHEDULES)
    for run in found.values():
        assert run["apart"] <= DOUBLE
        assert run["reads"] == [[0] * 6] * stages


def test_what_there_is_to_sum_and_to_weigh_and_an_evaluation(tmp_path: Path) -> None:
    found = ran("models(); staged_runs.evaluated()", tmp_path)
    assert len(found) == 5
    assert max(run["apart"] for run in found.values()) <= DOUBLE
    assert found["metrics"]["counted"] > 0
    assert all(run["reads"] == [[0] * 6] * 2 for name, run in found.items() if name != "metrics")


def test_replicas_that_are_pipelines(tmp_path: Path) -> None:
    found = ran("hybrids()", tmp_path, devices=4)
    assert sorted(found) == ["fully_sharded", "mirrored"]
    assert max(run["apart"] for run in found.values()) <= DOUBLE
    # After the first, second and fourth round replicas compare what they hold.
    assert all(own[2:3] + own[4:] == [0] * 3 for own in found["mirrored"]["reads"])


@pytest.mark.parametrize("encrypt", [False, True])
def test_stages_and_replicas_over_hosts(encrypt: bool, tmp_path: Path) -> None:
    """Where the network is not trusted, through host memory and encrypted."""
    found = ran(f"over_hosts(4, {encrypt}); staged_runs.hybrids({encrypt})", tmp_path, hosts=2)
    assert len(found) == 3
    assert max(run["apart"] for run in found.values()) <= DOUBLE
    assert encrypt or found["1f1b"]["reads"] == [[0] * 6] * 4


def test_half_precision_is_that_of_one_device(tmp_path: Path) -> None:
    """Gradients that overflow at the first scales are left out on all stages, and where one device leaves them out."""
    for run in ran("halved()", tmp_path).values():
        assert run["apart"] <= 1e-6
        assert run["from_whole"] > 1e-5


def test_a_stage_that_dies_is_named_and_the_run_goes_on_with_fewer(tmp_path: Path) -> None:
    found = ran("killed()", tmp_path, devices=3)
    assert found["lost"]["after_s"] < NOTICED_S
    assert "rank 2 (stage 2 of 3)" in found["lost"]["error"]
    assert found["resumed"]["apart"] <= DOUBLE
