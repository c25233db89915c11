"""Servers among the processes that a launcher has started: the last ranks serve, the others train."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace as hr
from engine.ranks import TESTS, Ended, launcher, run_ranks
from engine.victims import NOTICED_S, make_job, split_model
from headrace.engine.local.fork_server import ForkServer

pytestmark = pytest.mark.slow

SCRIPT = TESTS / "engine" / "served_script.py"
WORLD = 3
SERVER = 2

Start = Callable[..., Ended]


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Start:
    """Returns `start(*arguments, awaited=3)`: three ranks of the script, of which so many end by themselves."""

    def start(*arguments: str, awaited: int = WORLD) -> Ended:
        return run_ranks(fork_server, tmp_path, SCRIPT, arguments, launcher(WORLD, "127.0.0.1"), awaited)

    return start


def test_the_last_rank_serves_and_every_rank_gets_the_run(start: Start) -> None:
    ended = start("fit")
    assert ended.codes == {0: 0, 1: 0, 2: 0}, ended.logs
    ours = hr.fit(make_job(), engine=hr.ThreadEngine())
    total = float(sum(tensor.double().sum() for tensor in ours.model.state_dict().values()))
    for said in ended.said:
        assert [line["workers"] for line in said] == [2, 2, 3]
        assert [line["status"] for line in said] == ["ok"] * 3
        assert said[0]["total"] == pytest.approx(total, abs=1e-6)
        assert said[2]["total"] == pytest.approx(total, abs=1e-6)
        assert said[1]["total"] == ended.said[0][1]["total"]


def test_replicas_of_two_ranks_and_their_servers(fork_server: ForkServer, tmp_path: Path) -> None:
    ended = run_ranks(fork_server, tmp_path, SCRIPT, ("replicas",), launcher(6, "127.0.0.1"), 6)
    assert ended.codes == dict.fromkeys(range(6), 0), ended.logs
    ours = hr.fit(make_job(model=split_model), engine=hr.ThreadEngine())
    total = float(sum(tensor.double().sum() for tensor in ours.model.state_dict().values()))
    for said in ended.said:
        assert [(line["status"], line["workers"]) for line in said] == [("ok", 4)] * 2
        assert [line["total"] for line in said] == pytest.approx([total] * 2, abs=1e-6)


def test_a_server_waits_for_a_worker_that_ends_late(start: Start) -> None:
    ended = start("late", "1")
    assert ended.codes == {0: 0, 1: 0, 2: 0}, ended.logs


def test_numbers_that_contradict_the_launcher(start: Start) -> None:
    ended = start("contradict")
    assert ended.codes == {0: 2, 1: 2, 2: 2}
    for rank in range(WORLD):
        message = ended.one(rank, "error")["message"]
        assert message.startswith("parameter_server(3) is 4 processes, 1 of which are servers or their backups, and ")
        assert "the launcher started 3; start 4, or give other numbers of workers" in message


@pytest.mark.parametrize("victim", [SERVER, 1])
@pytest.mark.parametrize(("deed", "reason"), [("kill", "has ended"), ("stop", "gave no sign of life for ")])
def test_a_rank_that_is_lost_is_named_by_the_others(start: Start, deed: str, reason: str, victim: int) -> None:
    ended = start(deed, str(victim), awaited=WORLD if deed == "kill" else WORLD - 1)
    others = [rank for rank in range(WORLD) if rank != victim]
    role = " (a server)" if victim == SERVER else ""
    # The first process that detects it tells the other.
    assert any(reason in ended.one(rank, "error")["message"] for rank in others)
    for rank in others:
        said = ended.one(rank, "error")
        assert said["error"] == "PeerLost"
        assert said["message"].startswith(f"rank {victim}{role} on {socket.gethostname()} was lost: ")
        assert said["at"] - ended.one(0, "deed")["at"] < NOTICED_S
        assert ended.codes[rank] == 4


def test_a_servers_error_is_its_own_and_the_workers_name_it(start: Start) -> None:
    ended = start("raise")
    assert "ValueError: planted at" in ended.logs[SERVER]
    assert "in step" in ended.logs[SERVER]
    for rank in range(SERVER):
        said = ended.one(rank, "error")
        assert said["message"].startswith(f"rank {SERVER} (a server) on {socket.gethostname()} was lost: ")
        assert said["at"] - ended.one(rank, "deed")["at"] < NOTICED_S + 10


@pytest.mark.parametrize("victim", [0, 1, SERVER])
def test_an_interrupt_of_one_rank_ends_all_in_order(start: Start, victim: int) -> None:
    ended = start("interrupt", str(victim))
    assert ended.codes == {0: 0, 1: 0, 2: 0}, ended.logs
    said = [ended.one(rank, "status") for rank in range(WORLD)]
    assert [line["status"] for line in said] == ["interrupted"] * WORLD
    assert len({line["total"] for line in said}) == 1
    assert said[0]["steps"] == said[1]["steps"] >= 4
