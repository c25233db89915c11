"""What every event says."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

LAUNCHER = -1
"""The rank of the process that started the run."""


@dataclass(frozen=True)
class Event(ABC):
    """Attributes:
    rank: who says so; `LAUNCHER` for the process that started the run.
    time_s: seconds since the run began.
    """

    kind: ClassVar[str] = "event"
    rank: int
    time_s: float
