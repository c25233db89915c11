"""Writes a trained model into a folder: traces it, writes its files, and runs each beside the trained model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.errors import DataError, JobError, UnfitMachine, UsageError
from headrace.export import programs, signature
from headrace.export.browser.runtime import find_runtime, write_page
from headrace.export.choice import DEFAULT, FORMATS, PRECISIONS, ExportChoice
from headrace.export.mobile.executorch import MOST_EXAMPLES, require_executorch, save_pte, trace_for_phone
from headrace.export.mobile.litert import require_litert, save_tflite
from headrace.export.opening import open_runner
from headrace.export.predictor import Predictor, answering_form, inputs_of, keeps_cache, predictor_of, run
from headrace.export.programs import ProgramRunner
from headrace.export.quantize.measuring import Program, metrics_of
from headrace.export.quantize.onnx import quantize_onnx
from headrace.export.signature import Artefact, Quantization, Signature, TensorForm, form_of, values_of
from headrace.machine import disk
from headrace.machine.identity import versions
from headrace.machine.temporary import temporary_folder
from headrace.spec.job import Job

SAMPLE = "sample.safetensors"
"""Inputs and outputs of a few examples, as "input/NAME" and "output/NAME"."""

MOST_DIFFERENT = 1e-4
"""Relative to the largest value of an output."""
MOST_ROUNDED = 0.25
"""Of a quantized file: the root of the mean square of the difference, relative to that of the outputs."""
MOST_MISSING = 0.25
"""Of a quantized file: the share of the whole numbers of an output, such as the films of a ranking, that are others."""
_UNMEASURED = "what quantizing costs was not measured: there is no evaluation set with metrics of what is exported"
_SAMPLE, _CHECKED, _BATCH = 3, 100, 20
_SHORTEST = 2
"""The least length of a sequence in a program whose sequences may have any length."""
_MIXED = 1e-3
"""The least difference, as a share of the values, that other examples of a call make, and not rounding."""


def write_model(
    job: Job,
    model: nn.Module,
    folder: Path,
    facts: Signature,
    choice: ExportChoice = DEFAULT,
) -> Signature:
    """Writes a model's folder, whole or not at all; returns its signature.

    Args:
        job: whose data gives the examples, the evaluation set where there is one.
        model: trained.
        facts: what is known of the training; inputs, outputs and files are filled in here.
        choice: what is written.

    Raises:
        UsageError: the folder exists already, and is not empty.
        JobError: the model cannot be exported, or a file computes something else.
        UnfitMachine: a library is missing, or the folder cannot be written.
    """
    _check(folder, choice)
    web = find_runtime(choice.onnxruntime_web) if choice.target == "browser" else None
    job, model = answering_form(job, model)
    batches = examples_of(job)
    cached = keeps_cache(model)
    predictor, sample = predictor_of(job, model, batches[0])
    few = {name: tensor[:_SAMPLE] for name, tensor in sample.tensors.items()}
    if min(map(len, few.values())) < 2:
        raise DataError("an export needs two examples at least, and the data has one")
    if "tflite" in choice.formats:
        few = {name: tensor[:1] for name, tensor in few.items()}
    expected = run(predictor, few)
    _check_labels(choice.labels, expected)
    traced = _trace(predictor, few, choice)
    inputs = tuple(form_of(name, tensor, traced.free) for name, tensor in few.items())
    inputs = values_of(inputs, [inputs_of(job, model, batch).tensors for batch in batches])
    outputs, mixed = _outputs_of(predictor, few, expected, traced.free)
    made_by = {**versions(), **({} if web is None else {"onnxruntime-web": web.version})}
    facts = replace(facts, inputs=inputs, outputs=outputs, labels=choice.labels or facts.labels, versions=made_by)
    facts = replace(facts, notes=_notes(traced, cached, choice, mixed))
    subject = _Subject(job, predictor, batches)
    try:
        with temporary_folder(".export-", folder.parent) as aside:
            place = aside / "model"
            place.mkdir()
            facts = _write_programs(place, subject, traced, facts, choice)
            tensors = {f"input/{name}": tensor.contiguous() for name, tensor in few.items()}
            tensors |= {f"output/{name}": tensor.contiguous() for name, tensor in expected.items()}
            (place / SAMPLE).write_bytes(save(tensors))
            if web is not None:
                write_page(place, web)
            facts = _look(place, subject, facts, choice)
            signature.write(place, facts)
            if disk.exists(folder):
                folder.rmdir()
            os.rename(place, folder)
    except OSError as error:
        raise UnfitMachine(f"cannot write {folder}: {error.strerror or error}") from error
    return facts


@dataclass(frozen=True)
class _Subject:
    """The trained model, and the examples on which every file is compared with it."""

    job: Job
    predictor: Predictor
    batches: Sequence[Any]

    def inputs(self) -> list[Mapping[str, Tensor]]:
        """Returns the inputs of the model, by batch and by name."""
        return [inputs_of(self.job, self.predictor.model, batch).tensors for batch in self.batches]


def _trace(predictor: Predictor, few: Mapping[str, Tensor], choice: ExportChoice) -> programs.Traced:
    if "tflite" in choice.formats:
        return programs.trace_fixed(predictor, few)
    return trace_for_phone(predictor, few) if "pte" in choice.formats else programs.trace(predictor, few)


def _write_programs(
    place: Path, subject: _Subject, traced: programs.Traced, facts: Signature, choice: ExportChoice
) -> Signature:
    """Writes the files that compute; returns the signature with how they are quantized."""

    def calibration() -> list[Mapping[str, Tensor]]:
        # Ranges are measured on what the model was trained on: the evaluation set says what it costs.
        job = replace(subject.job, eval_data=None)
        return _Subject(job, subject.predictor, examples_of(job)).inputs()

    how = ""
    for form in choice.formats:
        path = place / FORMATS[form]
        if form == "pte":
            few = {name: tensor[:_SAMPLE] for name, tensor in subject.inputs()[0].items()}
            how = save_pte(traced, path, subject.predictor, few, choice.quantize, calibration)
        elif form == "tflite":
            save_tflite(traced, path, {name: tensor[:1] for name, tensor in subject.inputs()[0].items()})
        elif form == "onnx":
            programs.save_onnx(traced, path, facts.inputs, facts.outputs)
            if choice.quantize:
                how = quantize_onnx(path, choice.quantize, calibration())
        else:
            programs.save_torch(traced, path)
    return facts if choice.quantize is None else replace(facts, quantized=Quantization(choice.quantize, how))


def _look(place: Path, subject: _Subject, facts: Signature, choice: ExportChoice) -> Signature:
    """Returns the signature with every file, after each that computes was compared with the trained model."""
    files = {}
    for path in sorted(place.iterdir()):
        difference: float | None = None
        metrics: Mapping[str, float] = {}
        if path.name in (FORMATS[name] for name in choice.formats):
            runner = open_runner(path, facts.inputs, facts.outputs)
            difference = _checked(path, runner, subject, choice)
            if facts.quantized is not None:
                facts, metrics = _look_at_rounded(path, runner, subject, facts, facts.quantized)
        files[path.name] = Artefact(path.stat().st_size, signature.digest(path), difference, metrics)
    if facts.quantized is not None and not facts.quantized.before:
        facts = replace(facts, notes=(*facts.notes, _UNMEASURED))
    return replace(facts, files=files)


def _look_at_rounded(
    path: Path, runner: ProgramRunner, subject: _Subject, facts: Signature, quantized: Quantization
) -> tuple[Signature, Mapping[str, float]]:
    """Returns the signature with what rounding changed, and the metrics of the file.

    Raises:
        JobError: too many whole numbers, such as the films of a ranking, are others.
    """
    notes = []
    for name, missing in _missing(runner, subject).items():
        said = f"{missing:.0%} of the numbers in the output {name!r} are others than those of the trained model"
        if missing > MOST_MISSING:
            raise JobError(
                f"{path.name} in {quantized.kind}: {said}, at most {MOST_MISSING:.0%} are allowed; leave "
                "--quantize out, or take another precision"
            )
        notes.append(f"{path.name} in {quantized.kind}: {said}")
    both: dict[str, Program] = {"before": partial(run, subject.predictor), "after": runner.run}
    metrics = metrics_of(subject.job, subject.predictor.model, both)
    quantized = replace(quantized, before=metrics["before"])
    return replace(facts, quantized=quantized, notes=(*facts.notes, *notes)), metrics["after"]


def _checked(path: Path, runner: ProgramRunner, subject: _Subject, choice: ExportChoice) -> float:
    """Returns the largest difference from the trained model.

    Raises:
        JobError: it is too large; of a quantized model the root of the mean square counts, for rounding shows.
    """
    largest, typical = _difference(runner, subject)
    if choice.quantize is not None:
        if not typical <= MOST_ROUNDED:
            other = next(precision for precision in PRECISIONS if precision != choice.quantize)
            raise JobError(
                f"{path.name} in {choice.quantize} computes something else than the trained model: the root of "
                f"the mean square of the difference is {typical:.2g} of the output's, at most {MOST_ROUNDED:g} "
                f"is allowed; try --quantize {other}, or leave it out"
            )
    elif not largest <= MOST_DIFFERENT:
        rest = ",".join(name for name in choice.formats if FORMATS[name] != path.name)
        raise JobError(
            f"{path.name} computes something else than the trained model: the largest difference is {largest:.2g} of "
            f"the largest value, at most {MOST_DIFFERENT:g} is allowed; "
            + (f"leave it out: --formats {rest}" if rest else "another format may do")
        )
    return largest


def _difference(runner: ProgramRunner, subject: _Subject) -> tuple[float, float]:
    """Returns the largest difference, relative to the largest value of each output, and the root of the mean square.

    Whole numbers, such as the numbers of films, are the same or not: the share that differs counts. NaN stays NaN.
    """
    largest, squares = [torch.zeros(())], torch.zeros(2, dtype=torch.float64)
    for tensors in subject.inputs():
        outputs = runner.run(tensors)
        for name, wanted in run(subject.predictor, tensors).items():
            if not wanted.isfinite().all():
                raise JobError(f"the trained model returns {name} with NaN or infinity on its own data; train it again")
            if not wanted.numel() and outputs[name].shape == wanted.shape:
                continue
            if not wanted.is_floating_point():
                largest.append((outputs[name] != wanted).float().mean())
                continue
            scale = max(wanted.abs().max().item(), torch.finfo(torch.float32).tiny)
            apart = outputs[name] - wanted
            largest.append(apart.abs().max() / scale)
            squares += torch.stack([apart.double().square().sum(), wanted.double().square().sum()])
    typical = (squares[0] / squares[1].clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
    return torch.stack(largest).max().item(), typical.item()


def _missing(runner: ProgramRunner, subject: _Subject) -> dict[str, float]:
    """Returns, by output of whole numbers, the share of an example's numbers that are not in the other's, in any place.

    Rounding changes the order of a ranking much more than what is in it.
    """
    shares: dict[str, list[Tensor]] = {}
    for tensors in subject.inputs():
        outputs = runner.run(tensors)
        for name, wanted in run(subject.predictor, tensors).items():
            if not wanted.is_floating_point():
                rows = zip(wanted.flatten(1), outputs[name].flatten(1), strict=True) if wanted.dim() > 1 else ()
                ranked = [(~torch.isin(one, other)).float().mean() for one, other in rows]
                shares.setdefault(name, []).extend(ranked or [(wanted != outputs[name]).float().mean()])
    return {name: torch.stack(values).mean().item() for name, values in shares.items()}


def examples_of(job: Job) -> list[Any]:
    """Returns up to 100 examples of the evaluation set, or of the training set where there is none."""
    data = job.eval_sets.get("", job.data)
    pipeline, _ = as_pipeline(data)
    loader = Loader(pipeline, job.seed, min(_BATCH, len(pipeline)), (1,), 0, ordered=True)
    batches, count = [], 0
    for share in loader.sweep(alone=True):
        if share.examples:
            batches.append(share.batch)
            count += share.examples
        if count >= _CHECKED:
            break
    if not batches:
        raise DataError("the model cannot be exported without an example, and a filter leaves out all")
    return batches


def _outputs_of(
    predictor: Predictor, few: Mapping[str, Tensor], expected: Mapping[str, Tensor], free: Sequence[int]
) -> tuple[tuple[TensorForm, ...], list[str]]:
    """Returns the forms of the outputs, and the names of those that mix the examples of a call.

    The model runs once more for each free length of the inputs: equal lengths alone may be a coincidence.
    """
    others = {dim: run(predictor, _of_another_length(few, dim)) for dim in free}
    forms = tuple(
        form_of(name, tensor, tuple(dim for other in others.values() for dim in _following(tensor, other[name])))
        for name, tensor in expected.items()
    )
    mixed = [name for name, tensor in expected.items() if 0 in others and _mixes(tensor, others[0][name])]
    return forms, mixed


def _of_another_length(inputs: Mapping[str, Tensor], dim: int) -> dict[str, Tensor]:
    """Returns the inputs with an example less, or sequences that are shorter by one; those of two are longer."""
    length = next(iter(inputs.values())).shape[dim]
    if dim == 0 or length > _SHORTEST:
        return {name: tensor.narrow(dim, 0, length - 1) for name, tensor in inputs.items()}
    return {name: torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim) for name, tensor in inputs.items()}


def _following(output: Tensor, other: Tensor) -> tuple[int, ...]:
    """Returns the dimensions of an output that have another length where the inputs have."""
    return tuple(dim for dim, (one, two) in enumerate(zip(output.shape, other.shape, strict=True)) if one != two)


def _mixes(output: Tensor, fewer: Tensor) -> bool:
    """Whether what an example gets depends on the other examples of its call."""
    if output.shape[1:] != fewer.shape[1:]:
        return True
    first = (output[: len(fewer)] if output.dim() else output).double()
    scale = first[first.isfinite()].abs().sum().item() / max(1, first.numel())
    return not torch.allclose(first, fewer.double(), rtol=_MIXED, atol=_MIXED * scale, equal_nan=True)


def _notes(traced: programs.Traced, cached: bool, choice: ExportChoice, mixed: Sequence[str]) -> tuple[str, ...]:
    notes = [f"a call takes at most {MOST_EXAMPLES} examples"] if "pte" in choice.formats else []
    if "tflite" in choice.formats:
        notes.append("a call takes one example, and the shapes are fixed; in the file int32 stands for int64")
    if traced.why_fixed:
        notes.append(
            f"sequences have a fixed length, because the model could not be traced with any: {traced.why_fixed}"
        )
    if cached:
        notes.append("the cache of keys and values is left out: each call computes all tokens")
    if mixed:
        notes.append(
            f"what an example gets as {', '.join(mixed)} depends on the other examples of its call, and headrace serve "
            "computes those of several requests together: let a method exported() return what answers for each alone"
        )
    return tuple(notes)


def _check(folder: Path, choice: ExportChoice) -> None:
    if disk.exists(folder) and (not disk.is_folder(folder) or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already; name another folder, or delete it")
    if "pte" in choice.formats:
        require_executorch()
    if "tflite" in choice.formats:
        require_litert()
    if "onnx" in choice.formats:
        programs.require("onnx", "onnxscript", "onnxruntime")
    folder.parent.mkdir(parents=True, exist_ok=True)


def _check_labels(labels: Sequence[str], outputs: Mapping[str, Tensor]) -> None:
    lasts = {tensor.shape[-1] for tensor in outputs.values() if tensor.dim() > 1}
    if labels and lasts and len(labels) not in lasts:
        raise UsageError(
            f"there are {len(labels)} labels, and the model's outputs have {' and '.join(map(str, sorted(lasts)))} "
            "classes; give one label for each class"
        )
