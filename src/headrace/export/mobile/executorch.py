"""`model.pte`: how it is made, and how it is run here, by ExecuTorch's own runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import JobError, UnfitMachine
from headrace.export.predictor import Predictor
from headrace.export.programs import ProgramRunner, Traced, first_line, quiet, trace, writing
from headrace.export.signature import TensorForm
from headrace.machine.extras import absent, installed, remedy
from headrace.modules import copy_module

MOST_EXAMPLES = 32
"""Of one call: memory for so many is planned when the file is made."""
_OTHERS = "--formats tflite, or ONNX for a server or a browser, may have it"
_PAIRS = {(2, 13): "1.4", (2, 14): "1.5"}
"""The releases of executorch that were made for a release of torch."""


def require_executorch() -> None:
    """Raises an UnfitMachine with what to install where ExecuTorch is not there."""
    if missing := absent("executorch", "torchao"):
        raise UnfitMachine(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; {_pairing()}"
        )


def trace_for_phone(predictor: Predictor, inputs: Mapping[str, Tensor]) -> Traced:
    """Traces the model for up to `MOST_EXAMPLES` examples, by operations that ExecuTorch has.

    Raises:
        JobError: the model cannot be traced.
    """
    return trace(predictor, _repeated(inputs), MOST_EXAMPLES)


def save_pte(
    traced: Traced,
    path: Path,
    predictor: Predictor,
    inputs: Mapping[str, Tensor],
    quantize: str | None,
    calibration: Callable[[], Sequence[Mapping[str, Tensor]]],
) -> str:
    """Writes `model.pte` for XNNPACK; returns how it is quantized, "" where it is not.

    Args:
        calibration: returns inputs by name, from which the ranges of activations are measured.

    Raises:
        JobError: ExecuTorch cannot convert the model, with the releases that pair.
    """
    how = ""
    if quantize == "fp16":
        traced = trace_for_phone(_Half.of(predictor), inputs)
        how = "weights and computation in half precision"
    elif quantize == "int8":
        batches = calibration()
        traced = _quantized(traced, inputs, batches)
        examples = sum(len(next(iter(batch.values()))) for batch in batches)
        how = f"convolutions and dense layers in 8 bits, ranges measured on {examples} examples"
    with quiet():
        try:
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            lowered = to_edge_transform_and_lower(traced.program, partitioner=[XnnpackPartitioner()])
            content = lowered.to_executorch().buffer
        except Exception as error:  # of the converter, which raises what its passes raise
            raise _unconverted(error) from None
    with writing(path):
        path.write_bytes(content)
    return how


class PteRunner(ProgramRunner):
    """Runs `model.pte`."""

    def __init__(self, path: Path, inputs: Sequence[TensorForm], outputs: Sequence[TensorForm]) -> None:
        require_executorch()
        self._inputs, self._outputs = ([form.name for form in forms] for forms in (inputs, outputs))
        self._name = path.name
        with quiet():
            try:
                from executorch.runtime import Runtime

                # The program's memory is the method's, so that it is kept.
                self._program: Any = Runtime.get().load_program(path)
                self._method: Any = self._program.load_method("forward")
            except (RuntimeError, ImportError) as error:
                raise JobError(
                    f"ExecuTorch's runtime cannot load {path.name}: {first_line(error)}; it has no kernel for an "
                    f"operation of the model, or another release made the file: {_pairing()}"
                ) from None

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            outputs = self._method.execute([inputs[name].contiguous() for name in self._inputs])
        except RuntimeError as error:
            raise JobError(
                f"ExecuTorch's runtime cannot compute {len(next(iter(inputs.values())))} examples with {self._name}: "
                f"{first_line(error)}; an operation of the model has one size in it; {_OTHERS}"
            ) from None
        # They lie in memory that the next call writes to.
        return {name: output.clone() for name, output in zip(self._outputs, outputs, strict=True)}


class _Half(nn.Module):
    """A predictor in half precision that takes and returns what the original does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def of(cls, predictor: Predictor) -> Predictor:
        """Returns a copy of the predictor with the casts inside."""
        copy = copy_module(predictor)
        assert isinstance(copy, Predictor)
        copy.model = cls(copy.model.half())
        return copy

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Computes in half precision."""
        output = self.model(*map(_half, inputs), **{name: _half(value) for name, value in named.items()})
        if isinstance(output, Tensor):
            return _single(output)
        if isinstance(output, Mapping):
            return {name: _single(value) if isinstance(value, Tensor) else value for name, value in output.items()}
        return tuple(_single(value) for value in output)


def _repeated(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `MOST_EXAMPLES` examples: ExecuTorch 1.4 plans no memory for more than it saw in the trace (or 15)."""
    return {
        name: tensor.repeat(-(-MOST_EXAMPLES // len(tensor)), *(1,) * (tensor.dim() - 1))[:MOST_EXAMPLES]
        for name, tensor in inputs.items()
    }


def _half(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _quantized(traced: Traced, inputs: Mapping[str, Tensor], batches: Sequence[Mapping[str, Tensor]]) -> Traced:
    """Returns the program with convolutions and dense layers in 8 bits."""
    with quiet():
        try:
            from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
                XNNPACKQuantizer,
                get_symmetric_quantization_config,
            )
            from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

            quantizer = XNNPACKQuantizer()
            quantizer.set_global(get_symmetric_quantization_config(is_per_channel=True))
            prepared = prepare_pt2e(traced.program.module(), quantizer)
            with torch.no_grad():
                for batch in batches:
                    prepared(*batch.values())
            converted = convert_pt2e(prepared)
            program = torch.export.export(
                converted, tuple(_repeated(inputs).values()), dynamic_shapes=traced.dynamic_shapes[0], strict=False
            )
        except Exception as error:  # of the quantizer, which raises what its passes raise
            raise _unconverted(error) from None
    return Traced(program, traced.free, traced.why_fixed, traced.dynamic_shapes)


def _unconverted(error: BaseException) -> JobError:
    return JobError(f"ExecuTorch cannot convert the model: {first_line(error)}; {_OTHERS}; {_pairing()}")


def _pairing() -> str:
    """Returns which release goes with the installed torch, and which one is installed."""
    version = torch.__version__.partition("+")[0]
    major, minor = (int(part) for part in version.split(".")[:2])
    paired = _PAIRS.get((major, minor))
    known = ", ".join(f"torch {a}.{b} with executorch {release}" for (a, b), release in _PAIRS.items())
    here = installed("executorch")
    there = "" if here is None else f"; installed is {here}"
    if paired is None:
        newest = f"{remedy('mobile')} takes the newest"
        return f"for torch {version} no release of executorch was tried ({known}); {newest}{there}"
    return f"with torch {version} goes `{remedy('mobile')} 'executorch=={paired}.*'`{there}"
