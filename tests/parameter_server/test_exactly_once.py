"""Servers and workers as processes: after whatever happens, every push counts once. Larger: benchmarks/exactly-once."""

from __future__ import annotations

from pathlib import Path

import pytest

from parameter_server.counting import World, count
from transport.faulty import Odds
from transport.ways import WAYS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", WAYS)
def test_every_push_counts_once_whatever_happens(tmp_path: Path, way: str) -> None:
    odds = Odds(lost=0.002, doubled=0.004, late=0.002, cut=0.002)
    result = count(World(tmp_path, way, odds=odds, kills=2, freezes=2, seed=1))
    assert (result.pushes, result.lost, result.doubled) == (1000, 0, 0)
    assert result.faults["killed"] == result.faults["frozen"] == 2
    assert result.faults.total() > 30


def test_what_is_lost_or_doubled_is_seen(tmp_path: Path) -> None:
    odds = Odds(lost=0.01, cut=0.01)
    for bug in ("forgets", "loses"):
        (tmp_path / bug).mkdir()
        result = count(World(tmp_path / bug, odds=odds, rounds=2, bug=bug))
        assert (result.lost > 0, result.doubled > 0) == (bug == "loses", bug == "forgets")
