"""The events of a run: the only thing that comes out of it. One JSON line each."""

from headrace.spec.events.averaged import ParametersAveraged
from headrace.spec.events.base import LAUNCHER, Event
from headrace.spec.events.event import (
    Evaluated,
    Failed,
    InputStats,
    Lost,
    NonFinite,
    Notice,
    RunEnded,
    RunStarted,
    Saved,
    ServerEnded,
    ServerStarted,
    ServerStats,
    SnapshotTaken,
    Stepped,
    WorkerEnded,
    WorkerStarted,
    decode,
    encode,
)
from headrace.spec.events.pipeline import PipelineStepTimed, StagePass
from headrace.spec.events.tallies import InputStageStats, ShardStats

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
