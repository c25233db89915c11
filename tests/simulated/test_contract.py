"""Strategies on simulated devices, of one host and of two: the numbers of one device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.strategies import DOUBLE
from simulated.cells import CELLS, LEVELS, cases_of
from simulated.cluster import COMPILES, on_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILES, reason="no C++ compiler here, for the devices")]

Cell = tuple[str, str, str]

QUICK: dict[int, Sequence[Cell]] = {
    1: [
        ("mirrored", "clipped-cnn", "uneven"),
        ("fully_sharded", "tied", "uneven"),
        ("expert_parallel", "clipped", "uneven"),
        ("pipeline", "clipped-tied", "tiny"),
        ("central_storage", "clipped-tied", "tiny"),
    ],
    2: [
        ("mirrored", "partial", "uneven"),
        ("mirrored experts", "clipped", "uneven"),
        ("pipeline", "deep", "uneven"),
        ("hybrid", "mlp", "uneven"),
    ],
}
"""By the number of hosts, of two devices each."""

REFUSED = {
    "central_storage": "keeps one copy in one host's memory",
    "unconnected": "works on one host",
}
"""What does not run on two hosts, and why."""

FOUR_STAGES = ("pipeline", "pipeline-1f1b", "pipeline-gpipe")
"""What needs a model of four layers on four devices."""

HOSTS = [(1, True), (2, False), (2, True)]
PLACES = ["one host", "hosts that trust", "hosts that encrypt"]


def trained(
    cells: Sequence[Cell], folder: Path, hosts: int, encrypt: bool, servers: int = 0, devices: int = 2
) -> list[dict[str, Any]]:
    """Returns what rank 0 says of each cell."""
    program = f"from simulated import nccl, contract\ncontract.main({list(cells)!r}, {devices * hosts}, {encrypt})"
    ended = on_hosts(program, folder, hosts, devices, servers, timeout_s=1200)
    assert set(ended.codes) == {0}, ended.errors
    return ended.said[0]


def require_equal(said: Sequence[dict[str, Any]], devices: Sequence[str]) -> None:
    wrong = [one for one in said if "error" in one or not max(one["apart"], one["losses"], one["metrics"]) <= DOUBLE]
    assert not wrong, json.dumps(wrong, indent=1)
    assert [one["cell"] for one in said if one["devices"][: len(devices)] != list(devices)] == []


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_selection_is_one_device(hosts: int, tmp_path: Path) -> None:
    said = trained(QUICK[hosts], tmp_path, hosts, encrypt=False)
    assert len(said) == len(QUICK[hosts])
    require_equal(said, ["fake:0", "fake:1"] * hosts)


def test_levels_on_four_devices_are_one_device(tmp_path: Path) -> None:
    said = trained([(name, "clipped", "uneven") for name in list(LEVELS)[:2]], tmp_path, 1, encrypt=False, devices=4)
    require_equal(said, [f"fake:{index}" for index in range(4)])


@pytest.mark.full
@pytest.mark.parametrize(("hosts", "encrypt"), HOSTS, ids=PLACES)
@pytest.mark.parametrize("name", sorted(CELLS))
def test_every_strategy_trains_every_case(name: str, hosts: int, encrypt: bool, tmp_path: Path) -> None:
    cases = [case for case in cases_of(name) if hosts == 1 or name not in FOUR_STAGES or case == "deep"]
    cells = [(name, case, size) for case, size in zip(cases, ["tiny", "uneven", "even"] * len(cases), strict=False)]
    devices = 2 ** len(LEVELS[name]) // hosts if name in LEVELS else 2
    said = trained(cells, tmp_path, hosts, encrypt, CELLS[name].servers if hosts > 1 else 0, devices)
    if hosts > 1 and name in REFUSED:
        assert all(REFUSED[name] in one["error"] for one in said)
        return
    require_equal(said, [f"fake:{index}" for index in range(devices)] * hosts)
