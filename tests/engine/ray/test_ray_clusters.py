"""Runs on Ray clusters of three nodes: their results, what is lost and goes on, and what their errors say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.ranks import TESTS
from engine.ray.clusters import local_cluster, own_address

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    # Five nodes start one after the other, each in up to ten seconds where others use the machine.
    pytest.mark.timeout(600),
    pytest.mark.skipif(not own_address(), reason="nodes need an address that is not this machine's own for itself"),
    pytest.mark.usefixtures("real_python"),
]

SCRIPT = TESTS / "engine" / "ray" / "driver_script.py"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of nodes that no test ends."""
    with local_cluster([("a", 2), ("b", 2), ("c", 2)]) as cluster:
        yield cluster.address


def drive(deed: str, address: str, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), deed, address, str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said


def test_one_node_and_several_give_what_threads_give(address: str, tmp_path: Path) -> None:
    said = drive("equal", address, tmp_path)
    assert said["totals"] == pytest.approx([said["totals"][0]] * 5, abs=1e-5)
    assert len(set(said["accuracies"])) == 1
    assert [len(hosts) for hosts in said["hosts"][1:]] == [1, 2, 2, 1]
    assert {"run_started", "stepped", "evaluated", "worker_ended", "run_ended"} <= set(said["kinds"][1])
    # Those of nodes that do not see the directory were brought.
    assert said["kinds"][4] == said["kinds"][3] == said["kinds"][2] == said["kinds"][1]
    # Ray gives 15 to what a node starts, which only root takes back.
    niceness = 15 if os.geteuid() else os.getpriority(os.PRIO_PROCESS, 0)
    assert said["logs"][4] == said["logs"][3] == said["logs"][1] == [f"a model is built with niceness {niceness}\n"] * 2


def test_a_lost_worker_is_started_again_on_its_node_or_on_another(tmp_path: Path) -> None:
    with local_cluster([("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]) as cluster:
        killed, cut = drive("survive", cluster.address, tmp_path)["runs"]
    for run in (killed, cut):
        assert run["status"] == "ok"
        # Each example was applied once an epoch.
        assert run["counts"] == [2000.0]
        assert [1, run["hosts"][1]] in run["lost"]
    own = killed["hosts"][1]
    assert f"rank 1 on {own} has come back" in killed["said"]
    assert any(text.startswith(f"rank 1 was on {cut['hosts'][1]} and is started again on ") for text in cut["said"])


def test_a_lost_server_is_replaced_and_may_be_lost_again(address: str, tmp_path: Path) -> None:
    run = drive("replace_server", address, tmp_path)
    assert run["status"] == "ok"
    assert run["counts"] == [4000.0]
    assert run["lost"] == [2, 3]
    assert run["ready"][:2] == [3, 2]
    assert any(text.startswith("rank 2 on ") and text.endswith(" has come back") for text in run["said"])


def test_a_server_of_a_lost_node_is_replaced_on_another(tmp_path: Path) -> None:
    with local_cluster([("a", 2), ("b", 1), ("c", 1), ("d", 1)]) as cluster:
        run = drive("move_server", cluster.address, tmp_path)
    assert run["status"] == "ok"
    assert run["counts"] == [4000.0]
    assert run["lost"] == [2, 3]
    assert run["ready"][:2] == [3, 2]
    (spare,) = {"a", "b", "c", "d"} - set(run["hosts"])
    assert f"rank 2 was on {run['hosts'][2]} and is started again on {spare}" in run["said"]


def test_workers_in_lockstep_go_on_without_one_that_is_lost_and_take_it_back(tmp_path: Path) -> None:
    with local_cluster([("a", 3), ("b", 1), ("c", 1), ("d", 1)]) as cluster:
        runs = drive("elastic", cluster.address, tmp_path)["runs"]
    for run, lost in zip(runs, (1, 1, 1, 0), strict=True):
        assert run["status"] == "interrupted"
        # No example was left out or used twice in an epoch.
        assert run["apart"] < 1.01
        assert any(f"begins with 2 workers: without rank {lost}" in text for text in run["said"])
    assert any("is started again on " in text for text in runs[2]["said"])
    assert any("leads from now on" in text for text in runs[3]["said"])
    assert any("with a new rank 0" in text for text in runs[3]["said"])


def test_a_worker_of_a_lost_node_comes_back_when_another_node_joins(tmp_path: Path) -> None:
    with (
        local_cluster([("a", 1), ("b", 1), ("c", 1)]) as cluster,
        ThreadPoolExecutor(1) as driver,
    ):
        said = driver.submit(drive, "grow", cluster.address, tmp_path)
        while not ((tmp_path / "smaller").exists() or said.done()):
            time.sleep(0.1)
        cluster.start("d", 1)
        run = said.result()
    assert run["status"] == "interrupted"
    assert run["apart"] < 1.01
    begun = [text for text in run["said"] if "begins with" in text]
    assert "begins with 2 workers: without rank 1" in begun[0]
    assert "with a new rank 1" in begun[1]
    assert f"rank 1 was on {run['hosts'][1]} and is started again on d" in run["said"]


def test_a_worker_leaves_and_comes_back_as_it_is_asked_to(address: str, tmp_path: Path) -> None:
    said = drive("scale", address, tmp_path)
    assert said["status"] == "interrupted"
    assert said["apart"] < 1.01
    assert said["said"] == [
        "2 workers from now on: rank 2 leaves after the present round",
        "3 workers from now on: rank 2 begins",
        "3 workers and +1 are 4; a run has 2 to 3, as many as it has reserved places for, and 3 train now",
    ]


def test_a_pipeline_names_the_lost_stage_and_resumes(tmp_path: Path) -> None:
    with local_cluster([("a", 2), ("b", 2)]) as cluster:
        said = drive("resume", cluster.address, tmp_path)
    kind, text = said["said"]
    assert kind == "PeerLost"
    assert text.startswith(f"rank 1 (stage 1 of 2) on {said['hosts'][1]} was lost: ")
    assert "resume=True (--resume) goes on from the last checkpoint" in text
    assert said["status"] == "ok"
    assert said["totals"][0] == pytest.approx(said["totals"][1], abs=1e-4)


def test_errors_and_ctrl_c(address: str, tmp_path: Path) -> None:
    said = drive("fail", address, tmp_path)
    text, traceback = said["raised"]
    assert text.startswith("rank 1 on ")
    assert text.endswith("failed: ValueError: a broken image")
    assert 'raise ValueError("a broken image")' in traceback
    assert "No module named 'only_here'" in said["module"]
    assert "hr.RayEngine(runtime_env=" in said["module"]
    busy = "the Ray cluster has not given 6 workers with 1 CPU each within 1 s: it has 4 CPU free, and in all a: 2 CPU;"
    assert said["busy"].startswith(busy)
    assert said["interrupted"] == "interrupted"
    assert said["reserved"] == 0


def test_a_data_set_of_ray_is_read_in_order_and_resumed(address: str, tmp_path: Path) -> None:
    said = drive("read", address, tmp_path)
    assert said["in_order"]
    from_ray, from_arrays, resumed = said["totals"]
    assert from_ray == from_arrays
    assert resumed == pytest.approx(from_ray, abs=1e-5)
    begins = (
        "the data set of Ray has no column 'colour'; it has image, digit, name, twice",
        "the data set of Ray has ",
        "the data set of Ray has no rows",
        "'x' has arrays of 2 shapes, (1,) and (2,) among them",
        "from_ray takes a ray.data.Dataset, got list",
    )
    assert all(map(str.startswith, said["refused"], begins)), said["refused"]
    assert "dataset.write_parquet(folder)" in said["refused"][1]
