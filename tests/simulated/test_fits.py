"""Fits in one process leave nothing behind, also those that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulated.cluster import COMPILES, on_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(not COMPILES, reason="no C++ compiler here, for the devices"),
]


# Each strategy fails in both ways, or now and then.
FAILING = [(13, [4, 8, 5, 9, 6, 10, 7, 11]), (100, [10, 45, 80])]


@pytest.mark.parametrize(("times", "failing"), FAILING, ids=["few", "many"])
def test_no_fit_leaves_anything(times: int, failing: list[int], tmp_path: Path) -> None:
    program = f"from simulated import fits\nfits.main({times}, {failing})"
    ended = on_hosts(program, tmp_path, launched=True, timeout_s=1500)
    assert ended.codes == [0, 0], ended.errors
    for lines in ended.said:
        assert [line["turn"] for line in lines if line["error"]] == sorted(failing)
        held = [
            {what: line[what] for what in ("threads", "descriptors", "groups", "blocks", "bytes")} for line in lines
        ]
        # The first of each strategy may open what a process keeps.
        settled = held[3]
        assert (settled["groups"], settled["blocks"], settled["bytes"]) == (0, 0, 0)
        assert [turn for turn, each in enumerate(held) if turn > 3 and each != settled] == []
