"""Contracts that what extends headrace must keep, and plain loops to compare with; made for tests of one's own."""

from __future__ import annotations

from headrace.testing.extensions import check_codec, check_source, check_tracker
from headrace.testing.references import Reference, ReferenceResult, WorkerCopies, distance, mean_of, one_device
from headrace.testing.schedules import check_pipeline_schedule
from headrace.testing.strategies import CHECKS, StrategyContract, check_strategy

__all__ = [
    "CHECKS",
    "Reference",
    "ReferenceResult",
    "StrategyContract",
    "WorkerCopies",
    "check_codec",
    "check_pipeline_schedule",
    "check_source",
    "check_strategy",
    "check_tracker",
    "distance",
    "mean_of",
    "one_device",
]
