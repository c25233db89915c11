"""Reads what the processes of a simulated run have written down, in a process without the accelerator."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import combinations
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


def disorder(calls: Iterable[Sequence[dict[str, Any]]]) -> list[str]:
    """Returns where two ranks make the calls that they share in different orders, of whatever groups.

    With real NCCL two communicators may then wait for each other for ever.
    """
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for every in calls:
        for call in every:
            by_rank.setdefault(call["rank"], []).append(call)
    found = []
    for first, second in combinations(sorted(by_rank), 2):
        queues = [deque(_shared(by_rank[rank], first, second)) for rank in (first, second)]
        if any(heads := _stuck(*queues)):
            found.append(f"ranks {first} and {second} wait for ever, one in {heads[0]}, the other in {heads[1]}")
    return found


def _stuck(one: deque[Counter[object]], other: deque[Counter[object]]) -> tuple[list[object], list[object]]:
    """Does what both have come to until no more is left, or neither goes on; returns where each is then."""
    while one and other:
        both = one[0] & other[0]
        if not both:
            break
        for queue in (one, other):
            queue[0] -= both
            if not queue[0]:
                queue.popleft()
    return tuple(list(queue[0]) if queue else [] for queue in (one, other))  # type: ignore[return-value]


def _shared(calls: Sequence[dict[str, Any]], first: int, second: int) -> list[Counter[object]]:
    """The calls of a rank in which two ranks take part, batch by batch."""
    found: list[Counter[object]] = []
    batch: tuple[object, ...] | None = None
    for call in sorted(calls, key=lambda call: float(call["at"])):
        if not {first, second} <= ({call["rank"], call["peer"]} if "peer" in call else set(call["members"])):
            continue
        said: object = (call["call"], *call["members"])
        if "peer" in call:
            said = "from", call["rank"] if call["call"] == "send" else call["peer"], *call["members"]
        key = (call["batch"], *call["members"]) if call.get("batch") is not None else None
        if key is None or key != batch:
            found.append(Counter())
        found[-1][said] += 1
        batch = key
    return found
