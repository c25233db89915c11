"""The events of a run, one JSON line each.

A process appends its events to one file, `<run>/events/rank-<n>.jsonl`; the launcher writes
`<run>/events/launcher.jsonl`. Reports and the planner read these files, never live objects. Times are seconds
on the host's monotonic clock since the run began.
"""

from __future__ import annotations

import json

from headrace.spec.events.run import LAUNCHER, Event, Failed, Lost, Notice, RunEnded, RunStarted
from headrace.spec.events.server import ServerEnded, ServerStarted, ServerStats, ShardStats, SnapshotTaken
from headrace.spec.events.worker import (
    Evaluated,
    InputStageStats,
    InputStats,
    NonFinite,
    ParametersAveraged,
    PipelineStepTimed,
    Saved,
    StagePass,
    Stepped,
    WorkerEnded,
    WorkerStarted,
)
from headrace.spec.plain import from_plain, to_plain

__all__ = [
    "LAUNCHER",
    "Evaluated",
    "Event",
    "Failed",
    "InputStageStats",
    "InputStats",
    "Lost",
    "NonFinite",
    "Notice",
    "ParametersAveraged",
    "PipelineStepTimed",
    "RunEnded",
    "RunStarted",
    "Saved",
    "ServerEnded",
    "ServerStarted",
    "ServerStats",
    "ShardStats",
    "SnapshotTaken",
    "StagePass",
    "Stepped",
    "WorkerEnded",
    "WorkerStarted",
    "decode",
    "encode",
]

_KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in (
        *(RunStarted, Notice, Failed, Lost, RunEnded),
        *(WorkerStarted, Stepped, InputStats, Evaluated, Saved, NonFinite),
        *(ParametersAveraged, PipelineStepTimed, WorkerEnded),
        *(ServerStarted, ServerStats, SnapshotTaken, ServerEnded),
    )
}


def encode(event: Event) -> str:
    """Returns the event as one line of JSON, without the line's end."""
    return json.dumps({"kind": event.kind, **to_plain(event)}, separators=(",", ":"))


def decode(line: str) -> Event:
    """Returns the event that `encode` wrote.

    Raises:
        ValueError: the line is no event.
    """
    try:
        plain = json.loads(line)
        return from_plain(_KINDS[plain.pop("kind")], plain)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an event: {line[:120]!r} ({error})") from error
