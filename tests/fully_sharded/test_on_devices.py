"""On simulated devices a unit takes two gathers and one scatter a step, and a rank holds its part and a few units."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from fully_sharded.device_sizes import ROUNDS, UNIT_BYTES, UNITS
from simulated.cluster import COMPILES, on_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILES, reason="no C++ compiler here, for the devices")]


@pytest.mark.parametrize(
    ("strategy", "devices", "parts", "sums"),
    [
        ("hr.FullySharded(2)", 2, 2, 0),
        ("hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2))", 4, 2, 1),
        ("hr.FullySharded(4, deferred=True)", 4, 4, 0),
    ],
    ids=["sharded", "sharded replicas", "deferred"],
)
def test_a_step_calls_what_the_algorithm_says_and_holds_a_part(
    strategy: str, devices: int, parts: int, sums: int, tmp_path: Path
) -> None:
    program = "import headrace as hr\nfrom simulated import nccl\nfrom fully_sharded import device_runs\n"
    ended = on_hosts(f"{program}device_runs.main({strategy})", tmp_path, 1, devices)
    assert ended.codes == [0], ended.errors
    assert ended.said[0][0]["apart"] <= 1e-9
    assert not any(counters["faults"] for counters in ended.counters.values())
    for rank in range(devices):
        calls = [call for every in ended.calls.values() for call in every if call["rank"] == rank]
        steps = [json.loads(line) for line in (tmp_path / f"steps.{rank}").read_text().splitlines()]
        assert len(steps) == ROUNDS
        start = int((tmp_path / f"start.{rank}").read_text())
        # Its part of the parameters and of the gradients, and one unit while it is divided.
        assert start <= ((2 * UNITS / parts + 1.6) if "deferred" in strategy else UNITS + 1) * UNIT_BYTES
        for step in steps:
            made = Counter(call["call"] for call in calls if step["began"] <= call["at"] <= step["ended"])
            assert made == Counter(all_gather_into=2 * UNITS, reduce_scatter=UNITS, all_reduce=sums)
            # Parameters, gradients and both averages of AdamW, of which each rank has a part, and what replicas sum; in
            # backward two units as they came and as they are used, one gradient, and two that are being summed.
            assert step["peak"] <= ((4 + sums) * UNITS / parts + 7.5) * UNIT_BYTES < (4 * UNITS + 2) * UNIT_BYTES
