"""Servers among the processes that somebody else has started: the last ranks serve, the others train."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from engine.test_launched import TESTS, free_port
from engine.victims import make_job
from headrace.engine.nursery import Nursery

pytestmark = pytest.mark.slow

SCRIPT = TESTS / "engine" / "served_script.py"
WORLD = 3
SERVER = 2
NOTICED_S = 4.0
"""A worker asks its launcher's others for two seconds before it blames the link."""


@dataclass(frozen=True)
class Ended:
    """Exit codes of those that ended by themselves, what every rank said, and its log."""

    codes: dict[int, int]
    said: list[list[dict[str, Any]]]
    logs: list[str]

    def one(self, rank: int, key: str) -> dict[str, Any]:
        (found,) = [line for line in self.said[rank] if key in line]
        return found


Start = Callable[..., Ended]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Start:
    """Returns `start(*arguments, awaited=3)`: three ranks of the script, of which so many end by themselves."""

    def start(*arguments: str, awaited: int = WORLD) -> Ended:
        held, lifeline = os.pipe()
        port = free_port()
        logs = [tmp_path / f"{rank}.log" for rank in range(WORLD)]
        codes: dict[int, int] = {}
        try:
            for rank in range(WORLD):
                names = {"RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                order = {
                    "script": str(SCRIPT),
                    "arguments": arguments,
                    "environment": {name: str(value) for name, value in names.items()},
                    "threads": 1,
                    "directory": str(tmp_path),
                    "path": [str(TESTS), *sys.path],
                    "log": str(logs[rank]),
                }
                nursery.spawn(rank, order, [held])
            deadline = time.monotonic() + 60
            while len(codes) < awaited and time.monotonic() < deadline:
                codes.update(nursery.ended(0.1))
            ended = dict(codes)
            nursery.kill([rank for rank in range(WORLD) if rank not in codes])
            while len(codes) < WORLD:
                codes.update(nursery.ended(0.1))
        finally:
            os.close(held)
            os.close(lifeline)
        texts = [log.read_text() for log in logs]
        said = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in texts]
        assert len(ended) == awaited, texts
        return Ended(ended, said, texts)

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


def test_numbers_that_contradict_the_launcher(start: Start) -> None:
    ended = start("contradict")
    assert ended.codes == {0: 2, 1: 2, 2: 2}
    for rank in range(WORLD):
        message = ended.one(rank, "error")["message"]
        assert "asks for 3 workers and 1 servers and the launcher started 3 processes" in message
        assert "start 4, or ask for fewer" in message


@pytest.mark.parametrize("victim", [SERVER, 1])
@pytest.mark.parametrize(("deed", "reason"), [("kill", "has ended"), ("stop", "gave no sign of life for 1.")])
def test_a_rank_that_is_lost_is_named_by_the_others(start: Start, deed: str, reason: str, victim: int) -> None:
    ended = start(deed, str(victim), awaited=WORLD if deed == "kill" else WORLD - 1)
    others = [rank for rank in range(WORLD) if rank != victim]
    # Whoever sees it first tells the other.
    assert any(reason in ended.one(rank, "error")["message"] for rank in others)
    for rank in others:
        said = ended.one(rank, "error")
        assert said["error"] == "PeerLost"
        assert said["message"].startswith(f"rank {victim} on {socket.gethostname()} was lost: ")
        assert said["at"] - ended.one(0, "deed")["at"] < NOTICED_S
        assert ended.codes[rank] == 4


def test_a_servers_error_is_its_own_and_the_workers_name_it(start: Start) -> None:
    ended = start("raise")
    assert "ValueError: planted at" in ended.logs[SERVER]
    assert "in step" in ended.logs[SERVER]
    for rank in range(SERVER):
        said = ended.one(rank, "error")
        assert said["message"].startswith(f"rank {SERVER} on {socket.gethostname()} was lost: ")
        assert said["at"] - ended.one(rank, "deed")["at"] < NOTICED_S + 10


@pytest.mark.parametrize("victim", [0, 1, SERVER])
def test_an_interrupt_of_one_rank_ends_all_in_order(start: Start, victim: int) -> None:
    ended = start("interrupt", str(victim))
    assert ended.codes == {0: 0, 1: 0, 2: 0}, ended.logs
    said = [ended.one(rank, "status") for rank in range(WORLD)]
    assert [line["status"] for line in said] == ["interrupted"] * WORLD
    assert len({line["total"] for line in said}) == 1
    assert said[0]["steps"] == said[1]["steps"] >= 4
