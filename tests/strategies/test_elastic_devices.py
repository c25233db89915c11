"""Workers on accelerators that are lost and replaced: their devices connect anew, and the numbers stay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.strategies import DOUBLE
from simulated.cluster import Ended, on_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here, which the simulated accelerator needs"),
]


def ran(call: str, folder: Path, devices: int) -> tuple[dict[str, Any], Ended]:
    program = f"from simulated import nccl\nfrom strategies import elastic_devices_runs\nelastic_devices_runs.{call}"
    ended = on_hosts(program, folder, devices=devices)
    assert ended.codes == [0], ended.errors
    return ended.said[0][0], ended


def test_a_worker_is_lost_while_devices_wait_for_it(tmp_path: Path) -> None:
    run, ended = ran("in_the_middle()", tmp_path, devices=3)
    assert run["apart"] <= DOUBLE
    assert "round 4 begins with 2 workers: without rank 1" in run["texts"]
    worlds = {tuple(dict.fromkeys(len(call["members"]) for call in calls)) for calls in ended.calls.values()}
    assert worlds == {(3,), (3, 2)}


@pytest.mark.full
def test_the_first_worker_is_lost_and_replaced(tmp_path: Path) -> None:
    run, _ = ran("first_lost()", tmp_path, devices=2)
    assert run["apart"] <= DOUBLE
    assert any("with a new rank" in text for text in run["texts"])


@pytest.mark.full
def test_a_worker_joins_on_the_first_ones_device(tmp_path: Path) -> None:
    run, ended = ran(f"one_more({str(tmp_path / 'run')!r})", tmp_path, devices=2)
    assert run["apart"] <= DOUBLE
    assert any("with a new rank 2" in text for text in run["texts"])
    assert {len(call["members"]) for calls in ended.calls.values() for call in calls} == {2}
