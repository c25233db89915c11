"""The files that compute: `model.pt2` (torch.export) and `model.onnx`, and how each is run."""

from __future__ import annotations

import io
import logging
import re
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from headrace.errors import DataError, JobError, UnfitMachine
from headrace.export.predictor import Predictor
from headrace.export.signature import TensorForm
from headrace.export.traced_layers import pooled_by_slices, whole_recurrent_layers
from headrace.machine.extras import absent, remedy

BATCH, TIME = "batch", "time"
_TORCH = str(Path(torch.__file__).parent)
_NODE = re.compile(r"translating node %(\w+) ")
"""Where torch names the node of the graph that has no ONNX form."""
_ONE_FILE_BYTES = 2 << 30
"""A larger ONNX model needs a second file for its weights."""


@dataclass(frozen=True)
class Traced:
    """The model as a graph of operations.

    Attributes:
        free: the dimensions of the inputs that may have any length.
        why_fixed: why the length of a sequence is fixed; "" where it is not, or where there is none.
        dynamic_shapes: what torch.export was told of the inputs.
    """

    program: ExportedProgram
    free: tuple[int, ...]
    why_fixed: str = ""
    dynamic_shapes: Any = None


class ProgramRunner(ABC):
    """Runs an exported file on named tensors."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs by name."""


def trace(predictor: Predictor, inputs: Mapping[str, Tensor], most: int | None = None) -> Traced:
    """Traces the model on at least two examples, for any number of them, or up to `most`.

    Sequences of whole numbers `(batch, time)` may have any length, too, where the model allows it. With `most`
    they are at most as long as these, and of a fixed length where there are recurrent layers, whose steps are unrolled.

    Raises:
        JobError: the model cannot be traced, or takes one number of examples only.
    """
    why = ""
    unrolled = most is not None and any(isinstance(module, nn.RNNBase) for module in predictor.modules())
    batch = Dim(BATCH, max=most)
    if free_lengths(inputs) == (0, 1) and unrolled:
        why = "the format has no recurrent layers, and their steps are unrolled"
    elif free_lengths(inputs) == (0, 1):
        longest = None if most is None else next(iter(inputs.values())).shape[1]
        try:
            return _traced(predictor, inputs, {0: batch, 1: Dim(TIME, min=2, max=longest)}, not unrolled)
        except Exception as error:  # of the user's model, in torch's tracer: the batch alone may still be free
            why = first_line(error)
    try:
        return replace(_traced(predictor, inputs, {0: batch}, not unrolled), why_fixed=why)
    except Exception as error:
        # Not "from error": torch adds the graph and a hundred frames of its own.
        raise _untraceable(predictor, error) from None


def trace_fixed(predictor: Predictor, inputs: Mapping[str, Tensor]) -> Traced:
    """Traces the model for the shapes of these inputs alone; steps of recurrent layers are unrolled.

    Raises:
        JobError: the model cannot be traced.
    """
    try:
        return _traced(predictor, inputs, {}, False)
    except Exception as error:
        raise _untraceable(predictor, error) from None


def free_lengths(inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Returns the dimensions that may have any length: the batch, and the time of sequences of whole numbers."""
    sequences = bool(inputs) and all(t.dim() == 2 and not t.is_floating_point() for t in inputs.values())
    return (0, 1) if sequences else (0,)


def save_torch(traced: Traced, path: Path) -> None:
    """Writes `model.pt2`."""
    # Into memory first: where a disk is full, torch ends the process.
    content = io.BytesIO()
    torch.export.save(traced.program, content)
    with writing(path):
        path.write_bytes(content.getbuffer())


def save_onnx(traced: Traced, path: Path, inputs: Sequence[TensorForm], outputs: Sequence[TensorForm]) -> None:
    """Writes `model.onnx`, with its weights in it up to 2 GB.

    Raises:
        UnfitMachine: the libraries are not there.
        JobError: an operation of the model has no ONNX form.
    """
    require("onnx", "onnxscript")
    with whole_recurrent_layers(), quiet():
        try:
            made = torch.onnx.export(
                traced.program,
                input_names=[form.name for form in inputs],
                output_names=[form.name for form in outputs],
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            raise JobError(
                f"the model has no ONNX form{_translated(traced.program, error)}: {first_line(error)}; compute this "
                "otherwise, or take --formats pt2"
            ) from None
    assert made is not None
    for values, forms in ((made.model.graph.inputs, inputs), (made.model.graph.outputs, outputs)):
        for value, form in zip(values, forms, strict=True):
            value.name = form.name
            value.shape = _named_shape(form)
    weights = sum(tensor.nbytes for tensor in traced.program.state_dict.values())
    with writing(path):
        made.save(path, external_data=weights >= _ONE_FILE_BYTES)


class TorchRunner(ProgramRunner):
    """Runs `model.pt2`."""

    def __init__(self, path: Path, inputs: Sequence[TensorForm], outputs: Sequence[TensorForm]) -> None:
        log = logging.getLogger("torch.export")
        level = log.level
        # It writes a traceback of what it raises.
        log.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                # torch 2.11 says so of the bytes that it has read.
                warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
                self._call: Callable[..., Mapping[str, Tensor]] = torch.export.load(path).module()
        except Exception as error:  # of torch, which raises what its readers raise
            raise DataError(f"{path} cannot be loaded: {first_line(error)}") from None
        finally:
            log.setLevel(level)
        self._inputs = [form.name for form in inputs]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(self._call(*(inputs[name] for name in self._inputs)))


class OnnxRunner(ProgramRunner):
    """Runs `model.onnx`."""

    def __init__(self, path: Path) -> None:
        require("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has one class for each status, all unnamed in its interface
            raise DataError(f"{path} cannot be run: {first_line(error)}") from None
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = self._session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(array) for name, array in zip(self._outputs, arrays, strict=True)}


def require(*libraries: str) -> None:
    """Raises an UnfitMachine with what to install where one of the libraries for ONNX is not there."""
    if missing := absent(*libraries):
        raise UnfitMachine(
            f"ONNX needs {', '.join(missing)} (not installed): {remedy('onnx')}, or leave it out: --formats pt2"
        )


def _traced(predictor: Predictor, inputs: Mapping[str, Tensor], dims: dict[int, Dim], whole: bool) -> Traced:
    shapes = (tuple(dims for _ in inputs),)
    with whole_recurrent_layers() if whole else nullcontext(), pooled_by_slices(), quiet():
        program = torch.export.export(predictor, tuple(inputs.values()), dynamic_shapes=shapes, strict=False)
    return Traced(program, tuple(dims), dynamic_shapes=shapes)


def _named_shape(form: TensorForm) -> Any:
    import onnx_ir

    names = (BATCH, TIME)
    return onnx_ir.Shape([names[min(dim, 1)] if length < 0 else length for dim, length in enumerate(form.shape)])


def _untraceable(predictor: Predictor, error: BaseException) -> JobError:
    return JobError(
        f"the model cannot be exported{_where(predictor, error)}: {first_line(error)}; what depends on values "
        "(`if x.sum() > 0`, .item()) or on one batch size cannot be traced: use torch.where, torch.cond, and "
        "x.shape[0]"
    )


def _translated(program: ExportedProgram, error: BaseException) -> str:
    """Returns ", at layers.2 (Gate)", whose operation the exporter did not translate; "" where unknown."""
    match, cause = None, error
    while match is None and cause is not None:
        match, cause = _NODE.search(str(cause)), cause.__cause__  # type: ignore[assignment]
    for node in program.graph.nodes:
        if match is not None and node.name == match[1] and (stack := node.meta.get("nn_module_stack")):
            path, kind = list(stack.values())[-1]
            return f", at {path.removeprefix('model').lstrip('.') or 'the model'} ({str(kind).rpartition('.')[2]})"
    return ""


def _where(predictor: Predictor, error: BaseException) -> str:
    """Returns ": layers.2 (Gate), model.py line 12", where tracing ended; "" where unknown."""
    names = {id(module): name for name, module in predictor.model.named_modules()}
    module, line = "", ""
    while error.__cause__ is not None:
        error = error.__cause__
    for frame, number in traceback.walk_tb(error.__traceback__):
        here = frame.f_locals.get("self")
        if isinstance(here, nn.Module) and id(here) in names:
            module = f"{names[id(here)] or 'the model'} ({type(here).__name__})"
        if here is not predictor and not frame.f_code.co_filename.startswith(_TORCH) and id(here) in names:
            line = f", {Path(frame.f_code.co_filename).name} line {number}"
    return f", at {module}{line}" if module else ""


def first_line(error: BaseException) -> str:
    """Returns the class and the first line of what an error was first raised for."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text:.300}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes an UnfitMachine of what the file system refuses."""
    try:
        yield
    except OSError as error:
        raise UnfitMachine(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out warnings of the exporters that are not about the model."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        # torch prints the graph as far as it came, before it raises.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
