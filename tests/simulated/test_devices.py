"""The simulated devices are as strict as real ones, and more: each rule has a scenario that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from simulated.cluster import COMPILES, on_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILES, reason="no C++ compiler here, for the devices")]


def test_order_waits_and_memory_are_simulated(tmp_path: Path) -> None:
    ended = on_hosts("from simulated import scenarios\nscenarios.alone()", tmp_path)
    assert ended.codes == [0], ended.errors
    ((said,),) = ended.said
    require_waits_counted(said["waits"])
    order = said["order"]
    assert "aten::add on stream 0 of fake:0 reads 12 bytes that aten::mul on stream 1 of fake:0" in order["early"]
    assert "writes 12 bytes that aten::mul on stream 1 of fake:0 reads" in order["over"]
    assert "was freed and is given out again while aten::mul on stream 1 of fake:0 may still use it" in order["freed"]
    assert (order["late"], order["kept"]) == ([3.0] * 3, [2.0] * 3)
    pinned = said["pinned"]
    assert (pinned["early"], pinned["asked"], pinned["late"]) == (True, False, [5.0] * 3)
    assert pinned["again"] == "nothing"
    assert "pinned memory was changed before its copy to the device was done" in pinned["changed"]
    assert max(said["moved"]) <= 1e-12
    memory = said["memory"]
    assert (memory["rise"], memory["peak"], memory["left"]) == (1 << 20, 1 << 20, [0, 0])
    assert "OutOfMemoryError: fake out of memory. Tried to allocate 2097152 bytes" in memory["full"]
    assert memory["other"] == "nothing"
    (counters,) = ended.counters.values()
    assert counters["items"] >= 2


def require_waits_counted(waits: Mapping[str, Any]) -> None:
    plain = {name: value for name, value in waits["plain"].items() if value and name != "kernels"}
    assert plain == {"pinned_writes": 1, "write_bytes": 128, "pins": 1, "pins_beside_kernels": 1}
    named = ("items", "reads", "shapes", "blocking_writes", "device_syncs")
    assert {name: waits["waiting"][name] for name in named} == dict(zip(named, (2, 1, 1, 1, 1), strict=True))
    assert waits["waiting"]["waits"] == 6
    assert ".item() waits for the device, where a test forbids waits" in waits["forbidden"]
