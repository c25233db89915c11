"""`headrace predict`: what a trained model says of the examples in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headrace.cli.command import argument, command, option
from headrace.cli.commands.saved.job_of_run import job_of_run
from headrace.cli.options import SettingsOption
from headrace.cli.output import Answer, writing
from headrace.errors import UsageError
from headrace.machine import disk
from headrace.report.format import plural

if TYPE_CHECKING:
    from headrace.export.tensors import Array

_EXAMPLES = """
  headrace predict runs/a images.npy
  headrace predict runs/a photo.png
  headrace predict runs/a rows.csv -o answers.jsonl
  headrace predict model examples.npz -o answers.npz
"""
_LINES, _ARRAYS = ".jsonl", ".npz"


@command(_EXAMPLES, "predicting")
def predict(
    answer: Answer,
    run: Annotated[Path, argument("RUN", "The directory of a run, or a folder that `export` has written.")],
    data: Annotated[Path, argument("DATA", "A file .npy, .npz, .csv, .json, or an image.")],
    output: Annotated[Path | None, option("--output -o FILE", "A new file .jsonl or .npz.")] = None,
    step: Annotated[int | None, option("--step N", "Of a checkpoint of the run.", min=0)] = None,
    job_file: Annotated[Path | None, option("--job JOB.py", "Where the run does not name its own.")] = None,
    settings: SettingsOption = None,
) -> None:
    """Print what a trained model says of examples.

    One line of JSON for each. The file holds the examples as the model takes them, after the transforms of the job's
    data. An image is cropped to its middle, resized, and its pixels are scaled to the range of the job's examples.
    """
    if output is not None and (disk.exists(output) or output.suffix not in (_LINES, _ARRAYS)):
        raise UsageError(f"--output takes a new file {_LINES} or {_ARRAYS}, got {output}")
    # Lazily: they import torch.
    from headrace.api.exporting import predict_file, predict_with_folder
    from headrace.export.signature import NAME

    if disk.exists(run / NAME):
        if step is not None or job_file is not None or settings:
            raise UsageError(f"{run} is an exported model; --step, --job and --set are for the directory of a run")
        task, outputs = predict_with_folder(run, data)
    else:
        job = job_of_run(run, job_file, settings, otherwise="call run.predict(...) in the program")
        task, outputs = job.task.name if job.task else "", predict_file(job, run, data, step)
    count = max(map(len, outputs.values()))
    if output is not None:
        _write(output, task, outputs)
        answer.give({"output": str(output), "examples": count}, f"{output}: {plural(count, 'example')}")
    elif answer.as_json:
        answer.document({"predictions": list(_rows(task, outputs))})
    else:
        answer.text("\n".join(_lines(task, outputs)))


def _write(path: Path, task: str, outputs: Mapping[str, Array]) -> None:
    # Lazily: `--help` need not wait for it.
    import numpy as np

    with writing("the file", path, "--output"), path.open("xb") as file:
        if path.suffix == _ARRAYS:
            np.savez(file, allow_pickle=False, **outputs)
        else:
            file.writelines(f"{line}\n".encode() for line in _lines(task, outputs))


def _lines(task: str, outputs: Mapping[str, Array]) -> Iterator[str]:
    return (json.dumps(row) for row in _rows(task, outputs))


def _rows(task: str, outputs: Mapping[str, Array]) -> Iterator[dict[str, Any]]:
    """Yields the outputs of each example, and the class of the largest where the task is one of several classes."""
    for values in zip(*outputs.values(), strict=True):
        row: dict[str, Any] = {}
        if task.startswith("multiclass") and values[0].ndim == 1:
            row["class"] = int(values[0].argmax())
        yield row | {name: value.tolist() for name, value in zip(outputs, values, strict=True)}
