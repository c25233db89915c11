"""Workers on several hosts that are lost while the others go on: every example is applied once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.networks import Start, network, starts
from engine.ranks import TESTS, Ended
from headrace.engine.local.fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.net]

SCRIPT = TESTS / "engine" / "lost_workers_script.py"
EPOCHS, VICTIM = 12, 1


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    """Three of them; the name of their network."""
    with network(3, kind="l") as name:
        yield name


@pytest.fixture
def start(fork_server: ForkServer, hosts: str, tmp_path: Path) -> Start:
    return starts(fork_server, hosts, SCRIPT, tmp_path)


def check(ended: Ended, survivors: tuple[int, ...], cause: str) -> None:
    """Checks that the others ended well, without an example that was lost or applied twice, and one line names it."""
    assert [ended.codes[rank] for rank in survivors] == [0] * len(survivors), ended.logs
    found = ended.one(0, "counts")
    (line,) = found["lost"]
    assert line.startswith(f"rank {VICTIM} on host-1 was lost ({cause}")
    assert line.endswith("the others go on without it")
    assert ended.logs[0].count(line) == 2, "on the console, and as this script prints it"
    for rank in survivors:
        assert ended.one(rank, "counts")["counts"] == [EPOCHS]


@pytest.mark.parametrize(
    ("deed", "strategy", "cause"),
    [
        ("kill", "parameter_server", "its connection to rank 0 has ended)"),
        ("stop", "in_step", "gave no sign of life for "),
        ("cut", "downpour", "gave no sign of life for "),
    ],
)
def test_the_others_go_on_without_a_worker(hosts: str, start: Start, deed: str, strategy: str, cause: str) -> None:
    try:
        ended = start(deed, strategy, on=(0, 1, 2, 0), awaited=4 if deed == "kill" else 3)
    finally:
        subprocess.run(["ip", "-n", f"{hosts}-1", "link", "set", "eth0", "up"], check=True)
    check(ended, (0, 2, 3), cause)


def test_a_worker_that_is_started_again_comes_back(start: Start) -> None:
    ended = start("return", "parameter_server", on=(0, 1, 2, 0))
    check(ended, (0, 1, 2, 3), "its connection to rank 0 has ended)")
    assert f"rank {VICTIM} on host-1 has come back" in ended.logs[0]
    assert ended.one(VICTIM, "ended")["ended"] == -9
    assert ended.one(0, "steps")["steps"] > 1, "it works again"


@pytest.mark.full
def test_two_processes_of_one_rank_are_one_too_many(start: Start) -> None:
    ended = start("twice", "parameter_server", on=(0, 1, 2, 0))
    assert "another process has begun as rank 1 before, and this one on host-1 cannot take its place" in ended.logs[1]
    assert ended.one(0, "counts")["counts"] == [EPOCHS]


@pytest.mark.full
def test_the_loss_of_a_part_of_a_replica_ends_the_run(start: Start) -> None:
    ended = start("kill", "hybrid", on=(0, 1, 0, 1, 0))
    # The second of a tensor's two ranks, in the first replica.
    assert {ended.codes[rank] for rank in (0, 2, 3, 4)} == {4}, ended.logs
    error = ended.one(0, "error")
    assert (error["error"], error["message"][:26]) == ("PeerLost", "rank 1 on host-1 was lost:")
