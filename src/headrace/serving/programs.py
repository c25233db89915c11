"""One exported model in memory: its folder is checked, and its sample shows that the program works here."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import DataError, HeadraceError
from headrace.export.signature import Signature, TensorForm, check_inside, open_file, read
from headrace.export.tensors import Array, form_text, numpy_type, shaped
from headrace.serving.batcher import Compute

ONNX, TORCH, SAMPLE = "model.onnx", "model.pt2", "sample.safetensors"
_ORT_TYPES = {"float": "float32", "double": "float64"}
_MOST_HEADER_BYTES, _MOST_SAMPLE_BYTES = 1 << 20, 64 << 20
_MOST_DIFFERENT = 1e-3
"""Of an output for the sample, relative to its largest value: another machine rounds differently."""


def _onnx(path: Path, facts: Signature, threads: int | None) -> Compute:
    """Returns what computes by `model.onnx`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if threads:
        options.intra_op_num_threads = threads
    # Threads that wait for the next operator would take the cores of those that read requests.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has one class for each status, all unnamed in its interface
        raise DataError(f"{path} cannot be run: {error!s:.300}") from error
    _check_forms(path, session.get_inputs(), facts.inputs)
    _check_forms(path, session.get_outputs(), facts.outputs)
    compute: Compute = partial(session.run, [form.name for form in facts.outputs])
    return compute


def _torch(path: Path, facts: Signature, threads: int | None) -> Compute:
    """Returns what computes by `model.pt2`; it imports torch."""
    import torch

    from headrace.export.programs import TorchRunner

    if threads:
        torch.set_num_threads(threads)
    runner = TorchRunner(path, facts.inputs, facts.outputs)

    def compute(inputs: Mapping[str, Array]) -> list[Array]:
        outputs = runner.run({name: torch.from_numpy(array) for name, array in inputs.items()})
        return [outputs[form.name].numpy() for form in facts.outputs]

    return compute


def open_program(folder: Path, threads: int | None = None, trust_pt2: bool = False) -> tuple[Signature, Compute]:
    """Returns the signature of an exported model and what computes its outputs, in order, tried on the sample.

    Args:
        threads: that compute; None for all cores.
        trust_pt2: whether `model.pt2` is loaded where there is no ONNX file: torch runs code that such a file may hold.

    Raises:
        DataError: the folder is not what was exported, or its program computes something else than its sample says.
    """
    facts = read(folder)
    for name in facts.files:
        check_inside(folder, name)
    for form in (*facts.inputs, *facts.outputs):
        numpy_type(form)
    if not facts.inputs or not facts.outputs:
        raise DataError(f"the model in {folder} has no {'inputs' if facts.outputs else 'outputs'}; export it again")
    if ONNX in facts.files:
        for name in facts.files:
            # Of more than 2 GB, the model has other files for its weights.
            if name.startswith(ONNX) and name != ONNX:
                open_file(folder, facts, name)
        compute = _onnx(open_file(folder, facts, ONNX), facts, threads)
    elif TORCH in facts.files:
        if not trust_pt2:
            raise DataError(
                f"{folder} has {TORCH} and no {ONNX}; torch runs code that a {TORCH} may hold: export with --formats "
                "onnx, or say --trust-pt2 where all folders are your own"
            )
        compute = _torch(open_file(folder, facts, TORCH), facts, threads)
    else:
        raise DataError(
            f"{folder} has neither {ONNX} nor {TORCH}; it lists {', '.join(sorted(facts.files)) or 'no file'}"
        )
    try:
        _compute_sample(folder, facts, compute)
    except HeadraceError:
        raise
    except Exception as error:  # of the runtime, which has a class for each status
        raise DataError(f"the model in {folder} does not compute its own sample: {error!s:.300}") from error
    return facts, compute


def _check_forms(path: Path, nodes: Sequence[Any], wanted: Sequence[TensorForm]) -> None:
    types = {}
    for node in nodes:
        kind = node.type.removeprefix("tensor(").removesuffix(")")
        types[node.name] = _ORT_TYPES.get(kind, kind)
    if types != {form.name: form.dtype for form in wanted}:
        raise DataError(
            f"{path} has {', '.join(f'{name} {kind}' for name, kind in types.items()):.300}, its signature says "
            f"{', '.join(map(form_text, wanted)):.300}; export the model again"
        )


def _compute_sample(folder: Path, facts: Signature, compute: Compute) -> None:
    if SAMPLE not in facts.files:
        raise DataError(f"{folder} has no {SAMPLE}, which shows that a model works here; export it again")
    sample = _read_sample(open_file(folder, facts, SAMPLE))
    inputs = {}
    for form in facts.inputs:
        array = sample.get(f"input/{form.name}")
        if array is None or array.dtype != numpy_type(form):
            raise DataError(f"{folder / SAMPLE} has no input/{form.name} of the type {form.dtype}; export it again")
        inputs[form.name] = shaped(form, array)
    recorded = max((file.difference or 0.0 for file in facts.files.values()), default=0.0)
    allowed = max(_MOST_DIFFERENT, 10 * recorded)
    for form, output in zip(facts.outputs, compute(inputs), strict=True):
        wanted = sample.get(f"output/{form.name}")
        if wanted is None or wanted.shape != output.shape:
            raise DataError(f"{folder / SAMPLE} has no output/{form.name} of the shape {output.shape}; export it again")
        difference = float(np.abs(output - wanted).max() / max(float(np.abs(wanted).max()), 1e-30))
        if not difference <= allowed:
            raise DataError(
                f"the model in {folder} computes {form.name} of its own sample {difference:.2g} off, at most "
                f"{allowed:.2g} is allowed; export it again"
            )


def _read_sample(path: Path) -> dict[str, Array]:
    # Lazily: the command line does without.
    from safetensors import SafetensorError
    from safetensors.numpy import load

    size = path.stat().st_size
    with path.open("rb") as file:
        content = file.read(_MOST_SAMPLE_BYTES + 1)
    if size > _MOST_SAMPLE_BYTES:
        raise DataError(f"{path} has {size:,} bytes, at most {_MOST_SAMPLE_BYTES:,} are read")
    header = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    if not 0 < header <= min(_MOST_HEADER_BYTES, size):
        raise DataError(f"{path} has a header of {header:,} bytes, at most {_MOST_HEADER_BYTES:,} are read")
    try:
        arrays: dict[str, Array] = load(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error!s:.200}") from None
    return arrays
