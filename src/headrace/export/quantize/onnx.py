"""`model.onnx` with weights of 8 bits, or in half precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.errors import JobError
from headrace.export.programs import quiet

_ONE_FILE_BYTES = 2 << 30
_RECURRENT = ("LSTM", "GRU", "RNN")
"""Where onnxruntime gets them with casts to half precision around, it ends the process."""
_ACTIVATIONS = ("Softmax", "LogSoftmax", "Sigmoid")


def quantize_onnx(path: Path, kind: str, calibration: Sequence[Mapping[str, Tensor]]) -> str:
    """Replaces an ONNX file by one with smaller numbers; inputs and outputs keep their types. Returns how it is done.

    Args:
        kind: "int8": 8 bits for weights and, in models with convolutions, for activations, whose ranges are measured;
            in others activations are quantized as they come. "fp16": half precision.
        calibration: inputs by name, from which ranges are measured.

    Raises:
        JobError: the model has more than 2 GB, or an operation that cannot be quantized.
    """
    import onnx

    if len(list(path.parent.glob(f"{path.name}*"))) > 1 or path.stat().st_size >= _ONE_FILE_BYTES:
        raise JobError(
            f"{path.name} has more than {_ONE_FILE_BYTES:,} bytes, which is not quantized; leave --quantize out"
        )
    with quiet():
        try:
            if kind == "fp16":
                return _half(path)
            convolutions = any(node.op_type == "Conv" for node in onnx.load(path).graph.node)
            return _static(path, calibration) if convolutions else _dynamic(path)
        except (ValueError, RuntimeError, KeyError, NotImplementedError, AttributeError) as error:
            raise JobError(
                f"{path.name} cannot be quantized to {kind}: {type(error).__name__}: {error!s:.200}; take the other of "
                "int8 and fp16, or leave --quantize out"
            ) from error


def _half(path: Path) -> str:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(path)
    if recurrent := sorted({node.op_type for node in model.graph.node} & set(_RECURRENT)):
        raise JobError(
            f"{path.name} has {', '.join(recurrent)}, which onnxruntime computes in single precision alone; take "
            "--quantize int8"
        )
    onnx.save(convert_float_to_float16(model, keep_io_types=True), path)
    return "weights and computation in half precision"


def _dynamic(path: Path) -> str:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    prepared = _prepared(path)
    # Of weights 7 bits: on processors without VNNI the sum of two products of 8 bits overflows 16 bits and is cut off.
    quantize_dynamic(prepared, path, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
    prepared.unlink()
    return "weights in 7 of 8 bits, activations quantized as they come"


def _static(path: Path, calibration: Sequence[Mapping[str, Tensor]]) -> str:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hands out the batches, once."""

        def __init__(self) -> None:
            self._rest: Iterator[Mapping[str, Tensor]] = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self._rest, None)
            return None if batch is None else {name: tensor.numpy() for name, tensor in batch.items()}

    prepared = _prepared(path)
    # A probability in 8 bits is 0 below 1/255, and its logarithm infinite.
    last = [node.name for node in onnx.load(prepared).graph.node if node.op_type in _ACTIVATIONS]
    quantize_static(
        prepared,
        path,
        Reader(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        nodes_to_exclude=last,
    )
    prepared.unlink()
    examples = sum(len(next(iter(batch.values()))) for batch in calibration)
    return f"weights and activations in 8 bits, ranges measured on {examples} examples"


def _prepared(path: Path) -> Path:
    """Writes the model beside itself with the shapes of all values, and with operations that belong together as one."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = path.with_name("prepared.onnx")
    # Symbolic shapes want sympy, and break at operations that onnxruntime's own optimizer makes.
    quant_pre_process(path, prepared, skip_symbolic_shape=True)
    return prepared
