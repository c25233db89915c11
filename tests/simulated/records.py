"""Reads what the processes of a simulated run have written down, in a process without the accelerator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COUNTERS = (
    "kernels",
    # Waits of the host for the device.
    "items",
    "shapes",
    "reads",
    "blocking_writes",
    "stream_syncs",
    "event_syncs",
    "device_syncs",
    # Copies that do not wait: to pinned memory, and from it; from pageable memory, which is slower.
    "pinned_reads",
    "read_bytes",
    "pinned_writes",
    "pageable_writes",
    "write_bytes",
    # Host memory that was pinned, and so much of it by threads that also compute on the device.
    "pins",
    "pins_beside_kernels",
    "faults",
)
WAITS = COUNTERS[1:8]


def with_waits(found: dict[str, int]) -> dict[str, int]:
    """Adds the sum of `WAITS`."""
    return {**found, "waits": sum(found[name] for name in WAITS)}


def counters_of(folder: Path) -> dict[int, dict[str, int]]:
    """What processes begun with SIMULATED_RECORDS=folder have done, by their ids."""
    return {
        int(path.suffix[1:]): with_waits(dict(zip(COUNTERS, memoryview(path.read_bytes()).cast("q"), strict=True)))
        for path in folder.glob("counters.*")
    }


def calls_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The calls of the stand-in for NCCL, by process, in their order."""
    return {
        int(path.suffix[1:]): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("calls.*")
    }
