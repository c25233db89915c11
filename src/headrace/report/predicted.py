"""What was predicted of a run, kept in its directory, and how far off it was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError
from headrace.machine import disk
from headrace.spec.files.tables import read_json
from headrace.spec.plain import from_plain, to_plain

_FILE = "prediction.json"


@dataclass(frozen=True)
class PredictedRun:
    """What a simulation says of a run, in the terms of its summary.

    Attributes:
        compute_s, exchange_s, update_s: parts of a step; a pipeline's bubbles count as computing, as they do where
            they are measured.
        moved_bytes_per_step: of all workers together.
        memory_bytes: of the fullest worker, without the runtime itself.
    """

    examples_per_s: float
    step_s: float
    compute_s: float
    exchange_s: float
    update_s: float
    moved_bytes_per_step: float
    memory_bytes: int

    def save(self, run_dir: Path) -> None:
        """Writes it into a run's directory; raises UsageError where that cannot be."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / _FILE).write_text(json.dumps(to_plain(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the prediction cannot be written to {run_dir}: {error.strerror}") from error

    @staticmethod
    def of_run(run_dir: Path) -> PredictedRun | None:
        """Returns what was predicted of a run, None if nothing was; raises UsageError for a file that is damaged."""
        file = run_dir / _FILE
        if not disk.exists(file):
            return None
        try:
            found: PredictedRun = from_plain(PredictedRun, read_json(file, "a prediction"))
        except TypeError as error:
            raise UsageError(f"{file} cannot be read as a prediction: {error}") from None
        return found
