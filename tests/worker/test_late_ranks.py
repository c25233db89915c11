"""Ranks on simulated devices that are killed, freeze, are late, or call something else: said with names, in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulated.cluster import COMPILES, on_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMPILES, reason="the simulated accelerator needs a C++ compiler"),
]

PROGRAM = """
from simulated import lost
lost.main()
"""


def outcome(folder: Path, hosts: int, fault: str, devices: int = 2, **environment: str) -> list[dict[str, Any]]:
    """Returns what each process that runs the script says in the end."""
    # A frozen process of several hosts does not end, and is ended after that time.
    ended = on_hosts(PROGRAM, folder, hosts=hosts, devices=devices, timeout_s=100, FAULT=fault, **environment)
    said = [line for lines in ended.said for line in lines]
    assert said, ended.errors
    return said


def is_within(said: dict[str, Any], limit_s: float) -> bool:
    """Whether a process has its error in time, but for what it waits for a processor that others use."""
    waited_s: float = said["s"]
    return waited_s < limit_s * LOAD and waited_s - said["crowded_s"] < limit_s


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_late_rank_is_waited_for_and_named(tmp_path: Path, hosts: int) -> None:
    said = outcome(tmp_path, hosts, "late")
    assert {each["ended"] for each in said} == {"ok"}
    notices = " ".join(said[0]["notices"])
    assert "rank 1 has not come to " in notices
    assert "rank 1: all_reduce (number " in notices
    assert ", in sleep_long); collectives wait" in notices


@pytest.mark.parametrize(("hosts", "devices"), [(1, 2), (2, 1), (2, 2)], ids=str)
def test_a_killed_rank_is_named_within_two_seconds(tmp_path: Path, hosts: int, devices: int) -> None:
    # Long before the time after which a silent one counts as lost.
    said = outcome(tmp_path, hosts, "killed", devices, TIMEOUT="30")
    for each in said:
        assert each["ended"].startswith("rank 1 on ")
        assert " was lost: " in each["ended"]
        assert is_within(each, 2.0)
    assert any("; rank 1: all_reduce (number " in each["ended"] for each in said)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_frozen_rank_is_named_after_the_timeout(tmp_path: Path, hosts: int) -> None:
    said = outcome(tmp_path, hosts, "frozen")
    # One notices it, and the others may hear it from that one.
    assert any("gave no sign of life for 2." in each["ended"] for each in said)
    for each in said:
        assert "rank 1 on " in each["ended"]
        assert is_within(each, 3.0)


@pytest.mark.parametrize("hosts", [1, 2])
def test_different_calls_are_named_with_both_ranks(tmp_path: Path, hosts: int) -> None:
    said = outcome(tmp_path, hosts, "another", SIMULATED_MISMATCH="hang")
    failed = next(each["ended"] for each in said if "different collectives" in each["ended"])
    assert "rank 1: broadcast (number " in failed
    assert failed.count(": all_reduce (number ") == 1
    told = json.loads((tmp_path / "run" / "flight-recorder" / "calls_rank_1.json").read_text())
    assert any("broadcast" in call for call in told["calls"][0][-2:])


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_call_that_never_ends_is_named_with_its_ranks(tmp_path: Path, hosts: int) -> None:
    faults = json.dumps([{"rank": 0, "call": "all_reduce", "at": 3, "do": "never"}])
    said = outcome(tmp_path, hosts, "never", SIMULATED_FAULTS=faults, LIMIT="4")
    failed = next(each["ended"] for each in said if "number" in each["ended"])
    assert " has not ended, 4 s after rank " in failed
    assert "; the last calls: rank 0: " in failed
    assert "flight-recorder" in failed


@pytest.mark.full
def test_a_rank_that_is_late_by_a_minute_is_waited_for(tmp_path: Path) -> None:
    said = outcome(tmp_path, 1, "late", SECONDS="60")
    assert said[0]["ended"] == "ok"
    assert sum("rank 1 has not come to " in line for line in said[0]["notices"]) == 2


LOAD = 3.0
"""How much longer it may take on a machine that does something else."""
