"""Writes down what is known of the collectives of a process when a run fails."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headrace import internals
from headrace.collectives.watchdog.boards import calls_of, joined, said
from headrace.shared_memory.calls import CallBoard


@dataclass(frozen=True)
class FlightRecord:
    """Where a rank writes what it has called, and what the `backend` of its collectives has recorded."""

    folder: Path
    rank: int
    backend: str

    def write(self, board: CallBoard) -> None:
        """Writes the calls that are remembered as JSON, and what torch has recorded, as `torchfrtrace` reads it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        groups = [[said(call) for call in calls_of(group)] for group in joined(board)]
        told = {"rank": self.rank, "activity": board.activity.decode(errors="replace"), "calls": groups}
        text = json.dumps(told, indent=1) + "\n"
        (self.folder / f"calls_rank_{self.rank}.json").write_text(text, encoding="utf-8")
        if record := internals.flight_record(self.backend):
            (self.folder / f"trace_rank_{self.rank}").write_bytes(record)
