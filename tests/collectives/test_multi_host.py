"""Collectives between hosts, in processes of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from collectives.conftest import Play
from collectives.scenarios import NO_DESCRIPTOR
from headrace.collectives.base import HostMap
from headrace.collectives.multi_host import MultiHostGroup, Watch
from headrace.errors import HeadraceError, PeerLost, PeersApart, UnfitMachine
from headrace.shared_memory.control_page import ControlPage

pytestmark = pytest.mark.slow


def test_every_verb_gives_what_the_collective_promises(play: Play, tmp_path: Path) -> None:
    assert play("use_the_wire", 2, store=str(tmp_path / "store"), apart=True) == [[], []]


@pytest.mark.parametrize(
    ("missing", "missing_everywhere"),
    [([[], [1]], []), ([[0, 1], [1, 2]], [1]), ([[0, 1, 2], [0, 1, 2]], [0, 1, 2]), ([[0], [1]], [])],
)
def test_a_meeting_brings_what_rank_0_has_decided(
    play: Play, tmp_path: Path, missing: list[list[int]], missing_everywhere: list[int]
) -> None:
    expected = [[missing_everywhere, 7, 2**40, 0], [missing_everywhere, 8, 2**40, 5]]
    assert play("meet_between_hosts", 2, store=str(tmp_path / "store"), missing=missing) == [expected] * 2


def test_groups_of_ranks_act_by_themselves_and_bring_on_what_rank_0_has_decided(play: Play, tmp_path: Path) -> None:
    for rank, (across, down, whole, heard, moved) in enumerate(
        play("meet_in_groups", 4, store=str(tmp_path / "store"))
    ):
        row, column = rank // 2 * 2, rank % 2
        assert across == [column, 2, 2 * row + 1, 2 * row + 1, 2 * row + 1, row]
        assert down == [rank // 2, 2, 2 * column + 2, 2 * column + 2, 2 * column + 2, column]
        assert whole == [rank, 4, 6, 6, 6, 0]
        assert (heard, moved) == (7, True)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("ended", "the loop on rank 1 ended after 3 rounds and rank 0 still waits for it"),
        ("lost", "rank 1 on this host was lost: the test says so"),
        ("gone", "rank 1 on the other host was lost: "),
        ("forgotten", ""),
    ],
)
def test_no_rank_waits_for_one_that_does_not_come(play: Play, tmp_path: Path, how: str, said: str) -> None:
    heard, nothing = play("part_between_hosts", 2, store=str(tmp_path / "store"), how=how)
    assert heard.startswith(said)
    assert bool(heard) == bool(said)
    assert nothing == ""


@pytest.mark.parametrize(
    ("verdict", "raised"),
    [
        (PeerLost(0, "mill", "gave no sign of life"), PeerLost),
        (PeersApart((1, "mill"), (0, "mill"), "it lives"), UnfitMachine),
    ],
    ids=["lost", "alive"],
)
def test_memory_of_its_host_that_a_rank_cannot_open(verdict: HeadraceError, raised: type[HeadraceError]) -> None:
    def accuse(error: Exception, suspect: int) -> NoReturn:
        assert suspect == 0
        raise verdict from error

    page = ControlPage.create(2)
    offered = json.dumps([[os.getpid(), NO_DESCRIPTOR, 4096], {}])
    watch, home = Watch(page, lambda: None, accuse, 10.0), HostMap(("mill", "mill"), "127.0.0.1")
    with pytest.raises(raised):
        MultiHostGroup(watch, 1, home, lambda own: [offered, own])
