"""The trained model of a run's directory, of its end or of one of its checkpoints, as files that run elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headrace.api.checks import inspect_job
from headrace.api.resume import find
from headrace.api.run import load_model
from headrace.api.verification.recording import Trained, evaluate_sets
from headrace.checkpoint import Checkpoint, CheckpointFolder
from headrace.errors import CheckpointMismatch, DataError, UsageError
from headrace.export.choice import DEFAULT, FORMATS, ExportChoice
from headrace.export.mobile.litert import one_by_one
from headrace.export.opening import open_runner
from headrace.export.predictor import answering_form, inputs_of, predictor_of
from headrace.export.predictor import run as run_predictor
from headrace.export.programs import first_line, free_lengths
from headrace.export.reading import read_inputs
from headrace.export.signature import Signature, TensorForm, form_of, open_file, read, values_of
from headrace.export.tensors import Array, check_lengths, not_finite
from headrace.export.writing import examples_of, write_model
from headrace.machine import disk
from headrace.modules import evaluating, parameters_and_buffers
from headrace.report.model.events import EventLog, of_kind, read_log
from headrace.report.model.summary import summarize
from headrace.spec.events import RunStarted
from headrace.spec.job import Job, JobSource
from headrace.training.update import AVERAGE
from headrace.worker.attributes import give_text
from headrace.worker.evaluations.loss import LOSS, without_loss
from headrace.worker.run_spec import model_path
from headrace.worker.state import LoadedCheckpoint, making_sense

_SLICE = 32


def source_of(run_dir: Path) -> JobSource | None:
    """Returns the job file of a run; None for a job that a program made.

    Raises:
        UsageError: it is no run's directory.
    """
    return _started(read_log(run_dir), run_dir).job


def export_run(
    job: Job,
    run_dir: Path,
    folder: Path,
    choice: ExportChoice = DEFAULT,
    step: int | None = None,
) -> Signature:
    """Writes the trained model of a run's directory into a folder; see `Run.export`.

    Args:
        job: of the run.
        choice: what is written.
        step: of the checkpoint to take; None for the model at the run's end, or the newest checkpoint of a run that has
            not come to its end.

    Raises:
        UsageError: there is no such run or checkpoint, or the folder exists already.
        CheckpointMismatch: the run is of another job.
        CorruptCheckpoint: a file of the checkpoint is missing or damaged, or all are.
        JobError: the model cannot be exported.
    """
    log = read_log(run_dir)
    started = _started(log, run_dir)
    job, module, checkpoint = trained(job, run_dir, step)
    evaluations = summarize(run_dir, log).curves.evaluations
    at = [each for each in evaluations if checkpoint is None or each.step <= checkpoint.step]
    facts = Signature(
        name=run_dir.resolve().name,
        inputs=(),
        outputs=(),
        task=job.task.name if job.task else "",
        strategy=started.strategy,
        step=checkpoint.step if checkpoint else None,
        metrics=dict(at[-1].metrics) if at else {},
    )
    return write_model(job, module.eval(), folder, facts, choice)


def trained(job: Job, run_dir: Path, step: int | None = None) -> tuple[Job, nn.Module, Checkpoint | None]:
    """Returns the trained model of a run, and the checkpoint that it comes from if it is not that of the run's end.

    The job's loss is the one that was trained with the model, where that has parameters or buffers.
    """
    module = inspect_job(job).module
    path = model_path(run_dir)
    if step is None and disk.is_file(path):
        with making_sense(path):
            load_model(module, path)
        checkpoint = None
    else:
        checkpoint = _checkpoint(run_dir, step)
        _load_checkpoint(module, checkpoint)
    loss = without_loss(module)
    return replace(job, loss=loss.eval()) if loss else job, module.eval(), checkpoint


def predict_file(job: Job, run_dir: Path, data: Path, step: int | None = None) -> dict[str, Array]:
    """Returns what `Run.predict` would for the examples of a file, by the outputs' names.

    Args:
        job: of the run. The first examples of its data say what the model takes.
        data: .npy, .npz, .csv, .json or an image; in the form that the model takes, after the pipeline's transforms.

    Raises:
        UsageError: there is no such run, checkpoint or file.
        CheckpointMismatch: the run is of another job.
        DataError: the file does not fit the model.
    """
    job, module = answering_form(job, trained(job, run_dir, step)[1])
    batches = examples_of(job)
    predictor, sample = predictor_of(job, module, batches[0])
    forms = tuple(form_of(name, tensor, free_lengths(sample.tensors)) for name, tensor in sample.tensors.items())
    forms = values_of(forms, [inputs_of(job, module, batch).tensors for batch in batches])
    return _predict(partial(run_predictor, predictor), read_inputs(data, forms), forms)


def evaluate_run(job: Job, run_dir: Path, step: int | None = None) -> tuple[int | None, dict[str, float]]:
    """Returns the step of the checkpoint, if it is one, and loss and metrics over the job's sets to evaluate on.

    Args:
        job: of the run, or one with the same model and other sets.

    Raises:
        UsageError: there is no such run or checkpoint, or the job has nothing to evaluate on.
        CheckpointMismatch: the run is of another job.
    """
    if not job.eval_sets:
        raise UsageError("the job has no eval_data; give it some, or name another job by --job")
    job, module, checkpoint = trained(job, run_dir, step)
    found = Trained()
    with evaluating(module):
        evaluate_sets(job, module, found)
    return checkpoint.step if checkpoint else None, found.metrics


def predict_with_folder(folder: Path, data: Path) -> tuple[str, dict[str, Array]]:
    """Returns the task of an exported model, and its outputs for the examples of a file, by name.

    Raises:
        UsageError: there is no such file.
        DataError: the folder or the file cannot be used.
    """
    facts = read(folder)
    # An error names ONNX where there is none of them.
    tried = ("onnx", "pt2", "pte", "tflite")
    name = next((FORMATS[each] for each in tried if FORMATS[each] in facts.files), FORMATS["onnx"])
    runner = open_runner(open_file(folder, facts, name), facts.inputs, facts.outputs)
    forms = one_by_one(facts.inputs) if name == FORMATS["tflite"] else facts.inputs
    return facts.task, _predict(runner.run, read_inputs(data, forms), forms)


def _predict(
    run: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    arrays: Mapping[str, Array],
    forms: Sequence[TensorForm],
) -> dict[str, Array]:
    found: dict[str, list[Tensor]] = {}
    count = check_lengths(arrays, forms)
    # In slices: the activations of all examples at once may not fit.
    for start in range(0, count, _SLICE):
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(array[start : start + _SLICE]))
            for name, array in arrays.items()
        }
        stop = min(start + _SLICE, count)
        try:
            outputs = run(tensors)
        except Exception as error:  # of the user's model, or of the runtime, which has a class for each status
            examples = f"examples {start} to {stop - 1}"
            raise DataError(f"the model cannot compute {examples}: {first_line(error)}") from error
        for name, output in outputs.items():
            parts = found.setdefault(name, [])
            parts.append(_by_example(name, output, stop - start, parts))
    if not count:
        raise DataError("there is no example; give one at least")
    whole = {name: torch.cat(parts).numpy() for name, parts in found.items()}
    for name, array in whole.items():
        if told := not_finite(name, array, len(array) == count):
            raise DataError(told)
    return whole


def _by_example(name: str, output: Tensor, count: int, before: Sequence[Tensor]) -> Tensor:
    """Returns an output that has one entry for each of `count` examples, of the same shape as those before.

    Raises:
        DataError: it has not.
    """
    shape = tuple(output.shape)
    if shape[:1] != (count,):
        told = f"has the shape {shape} for {count} examples, and not one entry for each"
    elif before and shape[1:] != tuple(before[0].shape[1:]):
        told = f"has the shapes {tuple(before[0].shape)} and {shape} for {len(before[0])} and {count} examples"
    else:
        # numpy has no bfloat16.
        return output.float() if output.dtype == torch.bfloat16 else output
    raise DataError(f"the output {name!r} {told}; give the model a method exported() that returns a module without it")


def _started(log: EventLog, run_dir: Path) -> RunStarted:
    started = list(of_kind(RunStarted, log.events))
    if not started:
        raise UsageError(f"{run_dir} holds no run; name the --run-dir of one")
    return started[-1]


def _checkpoint(run_dir: Path, step: int | None) -> Checkpoint:
    """Returns the verified checkpoint of a step, or the newest sound one."""
    folder = CheckpointFolder(run_dir / "checkpoints")
    steps = folder.steps()
    if step is None and steps:
        return find(run_dir, True)[0]
    if step is None or step not in steps:
        there = f"it has {', '.join(map(str, steps))}" if steps else "it has none, and no model at its end"
        raise UsageError(f"{run_dir} has no checkpoint{'' if step is None else f' of step {step}'}; {there}")
    return folder.open(step, verify=True)


def _load_checkpoint(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Puts the stages, slices and shards of all ranks together; averages of weights count where there are some."""
    with making_sense(checkpoint.path):
        stored = LoadedCheckpoint(checkpoint)
        wanted = {name: tensor.shape for name, tensor in parameters_and_buffers(module)}
        found = stored.shapes()
        if not any(f"/{LOSS}." in name for name in found):
            # One under stages or slices, whose buffers are each worker's own.
            without_loss(module)
            wanted = {name: shape for name, shape in wanted.items() if f"/{LOSS}." not in name}
        if differ := sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name)):
            raise CheckpointMismatch(
                checkpoint.path,
                tuple(f"{name}: {_shape(found.get(name))} saved, {_shape(wanted.get(name))} now" for name in differ),
            )
        # Rank 0's own buffers, and above them what is saved of all ranks: the means of running statistics.
        stored.load_buffers(module, 0, stored.ranks)
        stored.load_module(module)
        if drawn := stored.description.get("drawn"):
            give_text(module, drawn)
        named = dict(module.named_parameters())
        with torch.no_grad():
            for piece in stored.pieces():
                if piece.key == AVERAGE:
                    flat = named[piece.parameter].view(-1)
                    flat[piece.start : piece.start + piece.value.numel()] = piece.value.view(-1)


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))
