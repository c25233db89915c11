"""What runs an exported file here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.export import programs
from headrace.export.mobile.executorch import PteRunner
from headrace.export.mobile.litert import TfliteRunner
from headrace.export.signature import TensorForm


def open_runner(path: Path, inputs: Sequence[TensorForm], outputs: Sequence[TensorForm]) -> programs.ProgramRunner:
    """Returns what runs a file, by its suffix."""
    if path.suffix == ".pte":
        return PteRunner(path, inputs, outputs)
    if path.suffix == ".tflite":
        return TfliteRunner(path, inputs, outputs)
    return programs.TorchRunner(path, inputs, outputs) if path.suffix == ".pt2" else programs.OnnxRunner(path)
