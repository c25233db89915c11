"""Mailboxes of ranks on several hosts: the same interface as in memory, and no rank waits for a lost one."""

from __future__ import annotations

from pathlib import Path

import pytest

from channels.mail_scenarios import LARGE
from collectives.conftest import Play

pytestmark = pytest.mark.slow


def test_tensors_of_every_kind_come_as_they_were_sent_in_memory_and_between_hosts(play: Play, tmp_path: Path) -> None:
    assert play("exchange_everything", 3) == [[], [], []]


def test_a_sender_gets_as_far_ahead_as_there_is_room_and_no_further(play: Play, tmp_path: Path) -> None:
    _, _, (ahead, came) = play("get_ahead", 3)
    assert came == 40
    # Two at either end, and what lies in the buffers of both machines' TCP.
    tcp = sum(int(Path(f"/proc/sys/net/ipv4/tcp_{way}mem").read_text().split()[-1]) for way in "rw")
    assert 2 <= ahead <= 2 + 2 + -(-tcp // LARGE) < came


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("ended", "the loop on rank 2 ended after 3 rounds and rank 1 still waits for it"),
        ("lost", "rank 2 on this host was lost: the test says so"),
        ("gone", "rank 2 on the other host was lost: the connection was closed"),
    ],
)
def test_no_rank_waits_for_a_lost_one(play: Play, tmp_path: Path, how: str, expected: str, sends: bool) -> None:
    _, (heard, soon), _ = play("wait_for_mail", 3, how=how, sends=sends)
    assert heard.startswith(expected)
    assert soon
