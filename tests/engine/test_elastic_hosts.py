"""Elastic workers in lockstep on several hosts: the others go on, each round is done by all of them or by none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.elastic_loops import ROUND
from engine.networks import Start, network, starts
from engine.ranks import TESTS, Ended
from headrace.engine.local.fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.net]

SCRIPT = TESTS / "engine" / "views_script.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    """Three of them; the name of their network."""
    with network(3, kind="e") as name:
        yield name


@pytest.fixture
def start(fork_server: ForkServer, hosts: str, tmp_path: Path) -> Start:
    return starts(fork_server, hosts, SCRIPT, tmp_path)


def check_counts(ended: Ended, survivors: tuple[int, ...]) -> None:
    """Checks that each of them has a model that was trained on every example once an epoch."""
    assert [ended.codes[rank] for rank in survivors] == [0] * len(survivors), ended.logs
    assert [ended.one(rank, "off")["off"] < 1e-9 for rank in survivors] == [True] * len(survivors)
    assert [ended.one(rank, "summary")["summary"] for rank in survivors] == ["ok"] * len(survivors)


@pytest.mark.parametrize(
    ("deed", "first_without"),
    [
        # Its gradients may have left when it is killed; then the others do the round with them.
        ("sum", (ROUND, ROUND + 1)),
        pytest.param("kill", (ROUND,), marks=pytest.mark.full),
        pytest.param("update", (ROUND + 1,), marks=pytest.mark.full),
    ],
)
def test_the_others_end_as_if_the_lost_worker_had_left_on_purpose(
    fork_server: ForkServer, hosts: str, tmp_path: Path, deed: str, first_without: tuple[int, ...]
) -> None:
    def run(what: str) -> Ended:
        folder = tmp_path / what
        folder.mkdir()
        return starts(fork_server, hosts, SCRIPT, folder)("bits", what, "1", "2", on=(0, 1, 2))

    ended = run(deed)
    assert ended.codes == {0: 0, 1: -9, 2: 0}, ended.logs
    said = ended.one(0, "said")["said"]
    (first,) = [n for n in first_without if f"round {n} begins with 2 workers: without rank 1" in said]
    wanted = run("leave" if first == ROUND else "leave after")
    for rank in (0, 2):
        assert ended.one(rank, "total")["total"] == wanted.one(rank, "total")["total"], "to the last bit"


@pytest.mark.parametrize(
    ("strategy", "deed", "on", "first_without"),
    [
        ("central_storage", "kill", (0, 0, 0), ROUND),
        pytest.param("central_storage", "update", (0, 0, 0), ROUND, marks=pytest.mark.full),
        # The last synchronization before it.
        ("averaging", "kill", (0, 1, 2), 4),
        pytest.param("averaging", "kill", (0, 0, 1), 4, marks=pytest.mark.full),
    ],
)
def test_other_strategies_go_on_without_rank_0(
    start: Start, strategy: str, deed: str, on: tuple[int, ...], first_without: int
) -> None:
    ended = start("counts", deed, "0", "2", strategy, on=on)
    check_counts(ended, (1, 2))
    assert f"round {first_without} begins with 2 workers: without rank 0" in ended.one(1, "said")["said"]


def test_rank_0_is_killed_on_hosts_of_two_workers(start: Start) -> None:
    ended = start("counts", "kill", "0", "2", on=(0, 0, 1, 1))
    check_counts(ended, (1, 2, 3))
    assert f"round {ROUND} begins with 3 workers: without rank 0" in ended.one(1, "said")["said"]
    # Else a rank takes the end of one rank for that of another, which it still waits for.
    assert ended.one(3, "places")["places"] == ["rank 1", "rank 2", "rank 3"]


def test_the_larger_half_of_a_cut_network_goes_on_and_the_other_ends(hosts: str, start: Start) -> None:
    try:
        ended = start("counts", "cut", "0", "1", on=(0, 1, 2))
    finally:
        subprocess.run(["ip", "-n", f"{hosts}-0", "link", "set", "eth0", "up"], check=True)
    check_counts(ended, (1, 2))
    assert ended.codes[0] == 4
    assert ended.one(0, "error")["error"] == "LeftBehind"
    assert "only 1 of the 3 workers are reached from here" in ended.one(0, "error")["message"]


def test_a_worker_that_comes_back_gets_the_state_from_the_others(start: Start) -> None:
    ended = start("counts", "return", "1", "1", on=(0, 1, 2))
    check_counts(ended, (0, 1, 2))
    assert ended.one(1, "ended")["ended"] == -9
    said = "\n".join(ended.one(0, "said")["said"])
    assert f"round {ROUND} begins with 2 workers: without rank 1\n" in said
    assert "begins with 3 workers: with a new rank 1" in said


def test_rank_0_is_killed_and_comes_back_to_the_rank_that_leads_instead(start: Start) -> None:
    ended = start("counts", "succeed", "0", "1", on=(0, 1, 2))
    check_counts(ended, (0, 1, 2))
    assert ended.one(0, "ended")["ended"] == -9
    said = "\n".join(ended.one(1, "said")["said"])
    assert "rank 1 on host-1 leads from now on" in said
    assert "begins with 3 workers: with a new rank 0" in said
    # It shows the run where it prints.
    assert ["leads from now on, because rank 0 was lost" in log for log in ended.logs] == [False, True, False]


@pytest.mark.parametrize(
    ("deed", "strategy", "on"),
    [
        ("leaders", "mirrored", (0, 1, 2, 2)),
        pytest.param("leaders", "averaging", (0, 1, 2, 2), marks=pytest.mark.full),
        pytest.param("both", "mirrored", (0, 1, 2, 2), marks=pytest.mark.full),
        ("both", "central_storage", (0, 0, 0, 0)),
        pytest.param("both", "mirrored", (0, 0, 0, 0), marks=pytest.mark.full),
    ],
)
def test_the_second_one_that_leads_is_killed_too(start: Start, deed: str, strategy: str, on: tuple[int, ...]) -> None:
    ended = start("counts", deed, "0", "1", strategy, on=on)
    assert [ended.codes[rank] for rank in (0, 1)] == [-9, -9], ended.logs
    check_counts(ended, (2, 3))
    said = "\n".join(line for rank in (2, 3) for line in ended.one(rank, "said")["said"])
    # Of four workers three are a majority, and then two of three.
    assert "begins with 2 workers: without rank 1" in said
    if deed == "leaders":
        assert [f"rank {rank} on host-{on[rank]} leads from now on" in said for rank in (1, 2)] == [True, True]


def test_a_worker_leaves_between_two_rounds_when_it_is_asked_to(start: Start) -> None:
    ended = start("counts", "ask", "0", "1", on=(0, 1, 2))
    check_counts(ended, (0, 1))
    assert ended.codes[2] == 0
    assert ended.one(0, "states")["states"] == [[rank, 0, "trains"] for rank in range(3)]
    assert ended.one(0, "told")["told"] == "2 workers from now on: rank 2 leaves after the present round"
    assert "this worker has left the run, as it was asked to" in ended.logs[2]
    said = "\n".join(ended.one(0, "said")["said"])
    assert "begins with 2 workers: without rank 2" in said
    assert "rank 2 on host-2 has left, as it was asked to" in said
    assert ended.one(0, "lost")["lost"] == []


@pytest.mark.full
def test_a_worker_that_stands_still_is_left_behind(start: Start) -> None:
    check_counts(start("counts", "stop", "2", "1", on=(0, 1, 2), awaited=2), (0, 1))


@pytest.mark.full
def test_an_error_of_the_user_ends_all(start: Start) -> None:
    ended = start("counts", "fail", "1", "1", on=(0, 1, 2))
    assert ended.codes == {0: 4, 1: 1, 2: 4}
    assert "rank 1 on host-1 was lost: its part of the run has failed" in ended.one(2, "error")["message"]


def test_fewer_than_min_workers_end_the_run(start: Start) -> None:
    ended = start("counts", "kill", "2", "3", on=(0, 1, 2))
    assert ended.codes == {0: 4, 1: 4, 2: -9}, (ended.said, ended.logs)
    assert "2 of the workers are left, and min_workers=3" in ended.one(0, "error")["message"]
