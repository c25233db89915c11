"""Processes that a launcher has started: they find each other, agree, and detect each other's end."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace as hr
from engine.ranks import TESTS, Ended, launcher, run_ranks
from engine.victims import NOTICED_S, make_job, two_layers
from headrace.engine.local.fork_server import ForkServer

pytestmark = pytest.mark.slow

SCRIPT = TESTS / "engine" / "launched_script.py"

Start = Callable[..., Ended]


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Start:
    """Returns `start(*arguments, awaited=2)`: two ranks of the script, of which so many end by themselves."""

    def start(*arguments: str, awaited: int = 2) -> Ended:
        return run_ranks(fork_server, tmp_path, SCRIPT, arguments, launcher(2, "127.0.0.1"), awaited)

    return start


def test_three_runs_one_after_the_other_are_those_of_one_process(start: Start) -> None:
    ended = start("fit")
    assert ended.codes == {0: 0, 1: 0}
    ours = hr.fit(make_job(model=two_layers), engine=hr.ThreadEngine())
    total = float(sum(tensor.double().sum() for tensor in ours.model.state_dict().values()))
    for said in ended.said:
        assert [line["workers"] for line in said] == [2] * 3
        assert [line["status"] for line in said] == ["ok"] * 3
        assert [line["total"] for line in said] == pytest.approx([total] * 3, abs=1e-6)
        assert all(line["rate"] and "model.safetensors" in line["files"] for line in said)
        assert said[0]["events"] == ended.said[0][0]["events"] > 16
    assert [line["seen"] == line["events"] for line in ended.said[0]] == [True] * 3, "rank 0 leads"


def test_processes_that_have_not_come_are_named(fork_server: ForkServer, tmp_path: Path) -> None:
    said = [{**each, "HEADRACE_START_TIMEOUT_S": "2"} for each in launcher(4, "127.0.0.1")[:2]]
    ended = run_ranks(fork_server, tmp_path, SCRIPT, ["fit"], said, 2)
    assert ended.codes == {0: 1, 1: 1}
    wanted = "2 of 4 processes have come within 2 s: rank 0, 1; missing: rank 2, 3."
    assert [wanted in log for log in ended.logs] == [True, True]


def test_rank_0_alone_says_at_once_that_a_nesting_is_of_another_number(fork_server: ForkServer, tmp_path: Path) -> None:
    ended = run_ranks(fork_server, tmp_path, SCRIPT, ["nested"], launcher(4, "127.0.0.1")[:1], 1)
    said = ended.one(0, "error")
    assert said["error"] == "InfeasiblePlan"
    assert "hybrid(mirrored(2), fully_sharded(4)) is 8 processes, and the launcher started 4" in said["message"]
    assert said["at"] - ended.one(0, "deed")["at"] < NOTICED_S


def test_rank_0_is_told_of_events_while_it_trains(start: Start) -> None:
    ended = start("follow")
    assert ended.one(0, "heard")["heard"]
    # What the callback raises ends the run.
    assert ended.logs[0].rstrip().endswith("ValueError: planted")
    assert ended.codes == {0: 1, 1: 4}


def test_a_number_of_workers_that_contradicts_the_launcher(start: Start) -> None:
    ended = start("contradict")
    assert ended.codes == {0: 2, 1: 2}
    for rank in range(2):
        said = ended.one(rank, "error")
        assert said["error"] == "InfeasiblePlan"
        assert said["message"] == (
            "mirrored(3) is 3 processes, and the launcher started 2; start 3, or give other numbers of workers"
        )


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("deed", "code", "reason"),
    [
        ("kill", -signal.SIGKILL, "has ended"),
        ("leave", 0, "has ended"),
        ("raise", 1, "its part of the run has failed"),
        ("outlive", None, "its part of the run has failed"),
        ("stop", None, "gave no sign of life for "),
    ],
)
def test_a_rank_that_is_lost(start: Start, deed: str, code: int | None, reason: str, victim: int) -> None:
    ended = start(deed, str(victim), str(time.monotonic() + 200), awaited=1 if code is None else 2)
    other = 1 - victim
    said = ended.one(other, "error")
    assert said["error"] == "PeerLost"
    assert said["message"].startswith(f"rank {victim} on {socket.gethostname()} was lost: ")
    assert reason in said["message"]
    assert said["at"] - ended.one(victim, "deed")["at"] < NOTICED_S
    assert ended.codes == {other: 4, **({} if code is None else {victim: code})}
    if deed == "raise":
        assert ended.logs[victim].rstrip().endswith("ValueError: planted")


def test_an_interrupt_in_one_rank_ends_all_in_the_same_round(start: Start) -> None:
    ended = start("interrupt", "0")
    assert ended.codes == {0: 0, 1: 0}
    assert [ended.one(rank, "status")["status"] for rank in range(2)] == ["interrupted"] * 2
    assert ended.one(0, "total")["total"] == ended.one(1, "total")["total"]
