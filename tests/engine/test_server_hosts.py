"""Strategies with servers on several hosts: the results of one host, and a server that is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from engine.networks import Start, join_again, network, starts
from engine.ranks import TESTS, total
from engine.victims import NOTICED_S, lbfgs_job, make_job, split_model
from headrace.engine.local.fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.net]

SCRIPT = TESTS / "engine" / "server_hosts_script.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    """Three of them; the name of their network."""
    with network(3, kind="s") as name:
        yield name


@pytest.fixture
def start(fork_server: ForkServer, hosts: str, tmp_path: Path) -> Start:
    return starts(fork_server, hosts, SCRIPT, tmp_path)


def test_workers_and_servers_of_two_hosts_are_one_device(start: Start) -> None:
    ended = start("fit", on=(0, 1, 0))
    assert set(ended.codes.values()) == {0}, ended.logs
    ours = hr.fit(make_job(epochs=2), engine=hr.ThreadEngine())
    for said in ended.said:
        assert [line["total"] for line in said[:2]] == pytest.approx([total(ours.model)] * 2, abs=1e-6)
        assert all(line["loss"] < 0.1 for line in said)


def test_lbfgs_of_two_hosts_takes_the_steps_of_one(start: Start) -> None:
    ended = start("search", on=(0, 1, 0))
    assert set(ended.codes.values()) == {0}, ended.logs
    ours = hr.fit(lbfgs_job(), hr.Sandblaster(2, portions=6), engine=hr.ThreadEngine())
    assert ours.metrics["loss"] < 0.5
    for said in ended.said:
        assert said[0]["total"] == pytest.approx(total(ours.model), abs=1e-9)
    assert ended.said[0][0]["loss"] == pytest.approx(ours.metrics["loss"], rel=1e-9)


def test_replicas_of_one_host_and_of_two_and_their_servers_are_one_device(start: Start) -> None:
    ended = start("replicas", on=(0, 0, 0, 1, 1, 0))
    assert set(ended.codes.values()) == {0}, ended.logs
    ours = hr.fit(make_job(model=split_model), engine=hr.ThreadEngine())
    for said in ended.said:
        assert [line["total"] for line in said] == pytest.approx([total(ours.model)] * 2, abs=1e-6)


@pytest.mark.parametrize(("deed", "cause"), [("kill", "its process has ended"), ("cut", "gave no sign of life for ")])
def test_a_backup_on_another_host_takes_over(hosts: str, start: Start, deed: str, cause: str) -> None:
    try:
        ended = start(deed, on=(0, 0, 1, 2))
    finally:
        subprocess.run(["ip", "-n", f"{hosts}-1", "link", "set", "eth0", "up"], check=True)
    survivors = (0, 1, 3)
    assert [ended.codes[rank] for rank in survivors] == [0, 0, 0], ended.logs
    assert f"rank 2 on host-1 was lost ({cause}" in ended.one(0, "lost")["lost"][0]
    ours = hr.fit(make_job(steps=80, epochs=None), engine=hr.ThreadEngine())
    # Each gradient was applied once.
    for rank in survivors:
        assert ended.one(rank, "total")["total"] == pytest.approx(total(ours.model), abs=1e-6)


def test_a_server_that_is_started_again_is_the_backup_of_the_one_that_took_over(start: Start) -> None:
    ended = start("return", on=(0, 0, 1, 2))
    assert ended.codes == {0: 0, 1: 0, 2: 0, 3: -9}, ended.logs
    assert "rank 2 on host-1 has come back" in ended.one(0, "notices")["notices"]
    lost = [line.split(" (")[0] for line in ended.one(0, "lost")["lost"]]
    assert lost == ["rank 2 on host-1 was lost", "rank 3 on host-2 was lost"]
    ours = hr.fit(make_job(steps=80, epochs=None), engine=hr.ThreadEngine())
    for rank in (0, 1):
        assert ended.one(rank, "total")["total"] == pytest.approx(total(ours.model), abs=1e-6)


def test_workers_of_servers_need_no_link_to_each_other(hosts: str, start: Start) -> None:
    try:
        ended = start("part", on=(0, 1, 2, 0))
    finally:
        join_again(hosts, 1, 2)
    assert set(ended.codes.values()) == {0}, ended.logs
    ours = hr.fit(make_job(steps=50, epochs=None, global_batch_size=9), engine=hr.ThreadEngine())
    for rank in range(4):
        assert ended.one(rank, "total")["total"] == pytest.approx(total(ours.model), abs=1e-6)


def test_a_worker_and_a_server_that_do_not_reach_each_other_end_the_run(hosts: str, start: Start) -> None:
    try:
        # Two workers and the server.
        ended = start("part-server", on=(0, 1, 2))
    finally:
        join_again(hosts, 1, 2)
    assert ended.codes == dict.fromkeys(range(3), 4), ended.logs
    for rank in range(3):
        said = ended.one(rank, "error")
        assert said["error"] == "PeersApart"
        assert "rank 1 on host-1 and rank 2 on host-2 live and do not reach each other" in said["message"]
        assert said["at"] - ended.one(0, "struck")["at"] < 1 + NOTICED_S


def test_a_server_that_does_not_reach_its_backup_goes_on_without_it(hosts: str, start: Start) -> None:
    try:
        # A worker, its server and the backup.
        ended = start("part-backup", on=(0, 1, 2))
    finally:
        join_again(hosts, 1, 2)
    assert ended.codes == {0: 0, 1: 0, 2: 4}, ended.logs
    assert ended.one(2, "error")["error"] == "Replaced"
    ours = hr.fit(make_job(steps=30, epochs=None), engine=hr.ThreadEngine())
    assert ended.one(0, "total")["total"] == pytest.approx(total(ours.model), abs=1e-6)
