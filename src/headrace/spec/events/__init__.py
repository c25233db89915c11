"""The events of a run, one JSON line each.

A process appends its events to one file, `<run>/events/rank-<n>.jsonl`; the launcher writes
`<run>/events/launcher.jsonl`. Reports and the planner read these files, never live objects. Times are seconds
on the host's monotonic clock since the run began.
"""

from __future__ import annotations

from headrace.spec.events.run import (
    LAUNCHER,
    BackupReady,
    Event,
    Failed,
    HotRow,
    Lost,
    Notice,
    PushesApplied,
    RowsAsked,
    RowsHeld,
    RowsMoved,
    RunEnded,
    RunStarted,
    ServerEnded,
    ServerStarted,
    ServerStats,
    ShardStats,
    SnapshotTaken,
    TableStats,
    decode,
    encode,
)
from headrace.spec.events.worker import (
    Evaluated,
    InputStageStats,
    InputStats,
    NonFinite,
    ParametersAveraged,
    PipelineStepTimed,
    Saved,
    SharesBalanced,
    StagePass,
    Stepped,
    WorkerEnded,
    WorkerStarted,
)

__all__ = [
    "LAUNCHER",
    "BackupReady",
    "Evaluated",
    "Event",
    "Failed",
    "HotRow",
    "InputStageStats",
    "InputStats",
    "Lost",
    "NonFinite",
    "Notice",
    "ParametersAveraged",
    "PipelineStepTimed",
    "PushesApplied",
    "RowsAsked",
    "RowsHeld",
    "RowsMoved",
    "RunEnded",
    "RunStarted",
    "Saved",
    "ServerEnded",
    "ServerStarted",
    "ServerStats",
    "ShardStats",
    "SharesBalanced",
    "SnapshotTaken",
    "StagePass",
    "Stepped",
    "TableStats",
    "WorkerEnded",
    "WorkerStarted",
    "decode",
    "encode",
]
