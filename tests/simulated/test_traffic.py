"""What strategies send between simulated devices is what their algorithms say, within 1 %."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simulated.cluster import COMPILES, Ended, on_hosts
from simulated.records import disorder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILES, reason="no C++ compiler here, for the devices")]

WIDTHS = (64, 256, 64, 64, 8)
LAYERS = [4 * (before + 1) * after for before, after in pairwise(WIDTHS)]
MODEL, BATCH, ROUNDS = sum(LAYERS), 8, 6
"""Bytes of the model in `traffic.py`, examples a global batch, and rounds."""


def ring(world: int) -> float:
    """What a rank of a ring sends of a tensor whose parts it sums, or gathers."""
    return (world - 1) / world


def expected(name: str, world: int) -> Mapping[str, float]:
    """Returns how many bytes a rank sends by each kind of call, without what it sends at the start."""
    inner = world // 2
    return {
        "mirrored": {"all_reduce": 2 * ring(world) * MODEL * ROUNDS},
        "mirrored without overlap": {"all_reduce": 2 * ring(world) * MODEL * ROUNDS},
        # Forward and backward gather, except at the turn; gradients are scattered. The whole is gathered at the end.
        "fully_sharded": {
            "all_gather_into": ring(world) * (2 * ROUNDS + 1) * MODEL,
            "reduce_scatter": ring(world) * ROUNDS * MODEL,
        },
        "sharded replicas": {
            "all_gather_into": ring(2) * (2 * ROUNDS + 1) * MODEL,
            "reduce_scatter": ring(2) * ROUNDS * MODEL,
            "all_reduce": 2 * ring(inner) * ROUNDS * MODEL / 2 if inner > 1 else 0.0,
        },
        "local_sgd": {"all_reduce": 2 * ring(world) * MODEL * (ROUNDS // 3)},
        "diloco": {"all_reduce": 2 * ring(world) * MODEL * (ROUNDS // 3)},
    }[name]


def sent(ended: Ended, said: Mapping[str, Any], rank: int) -> Counter[str]:
    """Returns the bytes that a rank has sent while a strategy trained, by kind of call."""
    found: Counter[str] = Counter()
    for calls in ended.calls.values():
        for call in calls:
            if call["rank"] == rank and said["began"] <= call["at"] <= said["at"]:
                found[call["call"]] += call["sent"]
    return found


def trained(names: Sequence[str], folder: Path, hosts: int) -> Ended:
    program = f"from simulated import nccl, traffic\ntraffic.main({list(names)!r}, {2 * hosts}, False)"
    ended = on_hosts(program, folder, hosts, 2)
    assert set(ended.codes) == {0}, ended.errors
    return ended


MORE = ("tensor_parallel", "hybrid", "hybrid of stages", "pipeline-1f1b", "sharded stages")
NAMES = ("mirrored", "fully_sharded", "local_sgd", "diloco", "sharded replicas", "mirrored without overlap")


def test_bytes_are_those_of_the_algorithm(tmp_path: Path) -> None:
    require_bytes(("mirrored", "fully_sharded", "hybrid of stages"), tmp_path, 1)


@pytest.mark.full
@pytest.mark.parametrize("hosts", [1, 2])
def test_bytes_of_every_strategy(hosts: int, tmp_path: Path) -> None:
    require_bytes((*NAMES, *MORE), tmp_path, hosts)


def require_bytes(names: Sequence[str], folder: Path, hosts: int) -> None:
    ended = trained(names, folder, hosts)
    for said in ended.said[0]:
        during = [
            [call for call in calls if said["began"] <= call["at"] <= said["at"]] for calls in ended.calls.values()
        ]
        assert disorder(during) == [], said["strategy"]
    wrong = {}
    for said in [said for said in ended.said[0] if said["strategy"] in NAMES]:
        for rank in range(2 * hosts):
            found = sent(ended, said, rank)
            wanted = expected(said["strategy"], 2 * hosts)
            # The parameters at the start, and small numbers by which workers agree.
            more = {name: found[name] for name in found if name not in wanted and name != "broadcast"}
            off = {name: (found[name], most) for name, most in wanted.items() if abs(found[name] - most) > 0.01 * MODEL}
            if off or sum(more.values()) > 0.01 * MODEL * ROUNDS:
                wrong[said["strategy"], rank] = off, more
    assert wrong == {}
