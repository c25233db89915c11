"""The Open Inference Protocol, version 2, with the extension for binary tensors.

https://github.com/kserve/open-inference-protocol, and Triton's extension_binary_data.md and
extension_model_repository.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from headrace.errors import DataError
from headrace.export.signature import TensorForm
from headrace.export.tensors import Array, check_names, fits, form_text, numpy_type, typed
from headrace.serving.catalog import LoadedVersion, ServedModel
from headrace.serving.protocols.http import HttpAnswer, expect, is_number, parse_json, require
from headrace.serving.settings import RequestError

_MOST_ELEMENTS = 1 << 40
"""No body holds so many, and numpy makes no array of more than 2**63 bytes, even of one without an element."""
JSON_LENGTH = b"inference-header-content-length"
_KEPT, _KEPT_BYTES = 64, 1 << 10
"""Heads of a version's requests that are remembered, and how long one is at most."""
_DATATYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What a client asks for.

    Attributes:
        inputs: in the order of the signature.
        id: echoed, if given.
        outputs: the wanted names, and whether each is sent as binary data.
    """

    inputs: dict[str, Array]
    id: str | None
    outputs: Sequence[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class BinaryInput:
    """An input as binary data.

    Attributes:
        form: of the model's input.
        dtype, shape: of the array, whose numbers are little-endian.
        begin: where it begins in the request's binary data, in bytes.
        count: its elements.
    """

    form: TensorForm
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    count: int

    def read(self, binary: memoryview) -> Array:
        """Returns the array, whose memory is the request's."""
        array: Array = np.frombuffer(binary, self.dtype, self.count, self.begin).reshape(self.shape)
        # Bytes that are neither 0 nor 1 are no values of this type.
        if self.dtype.kind == "b" and (array.view(np.uint8) > 1).any():
            raise RequestError(400, f"input {self.form.name}: bytes of BOOL are 0 or 1")
        return array


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the JSON text of a request says; a client's requests differ in their binary data alone.

    Attributes:
        inputs: blocks of the binary data, or values of the text itself, in the order of the signature.
        binary_bytes: after the text.
        id, outputs: as of `InferenceRequest`.
    """

    inputs: Mapping[str, BinaryInput | Array]
    binary_bytes: int
    id: str | None
    outputs: Sequence[tuple[str, bool]]

    def request(self, binary: memoryview) -> InferenceRequest:
        """Returns the request with its binary data."""
        if len(binary) != self.binary_bytes:
            raise RequestError(
                400, f"{len(binary)} bytes of binary data, the inputs' binary_data_size add up to {self.binary_bytes}"
            )
        arrays = {
            name: given.read(binary) if isinstance(given, BinaryInput) else given for name, given in self.inputs.items()
        }
        return InferenceRequest(arrays, self.id, self.outputs)


def datatype(form: TensorForm) -> str:
    """Returns the protocol's name of a type: "FP32"."""
    return _DATATYPES[form.dtype]


def server_metadata(version: str) -> dict[str, Any]:
    """Returns the answer to `GET /v2`."""
    return {"name": "headrace", "version": version, "extensions": ["binary_tensor_data", "model_repository"]}


def model_metadata(model: ServedModel, version: LoadedVersion) -> dict[str, Any]:
    """Returns the answer to `GET /v2/models/NAME`."""
    facts = version.facts
    return {
        "name": model.name,
        "versions": [str(number) for number in sorted(model.versions)],
        "platform": "onnxruntime_onnx" if "model.onnx" in facts.files else "pytorch_export",
        "inputs": [_tensor_metadata(form) for form in facts.inputs],
        "outputs": [_tensor_metadata(form) for form in facts.outputs],
    }


def read_request(
    body: bytes,
    json_length: str | None,
    forms: Sequence[TensorForm],
    outputs: Sequence[TensorForm],
    known: MutableMapping[bytes, RequestHead],
) -> InferenceRequest:
    """Returns the content of a request.

    Args:
        json_length: the header `Inference-Header-Content-Length`; binary data follows after so many bytes.
        forms, outputs: of the model.
        known: heads of earlier requests for this model by their text; this one's is added.

    Raises:
        RequestError: 400 with what was expected, or 413.
    """
    text, binary = body, memoryview(b"")
    if json_length is not None:
        length = int(json_length) if is_number(json_length) and len(json_length) < 12 else -1
        if not 0 < length <= len(body):
            raise RequestError(
                400, f"Inference-Header-Content-Length is {json_length[:20]!r}, the body has {len(body)} bytes"
            )
        text, binary = body[:length], memoryview(body)[length:]
    head = known.get(text)
    if head is None:
        head = _read_head(text, forms, outputs)
        if len(text) <= _KEPT_BYTES and all(isinstance(each, BinaryInput) for each in head.inputs.values()):
            if len(known) >= _KEPT:
                known.clear()
            known[text] = head
    return head.request(binary)


def _read_head(text: bytes, forms: Sequence[TensorForm], outputs: Sequence[TensorForm]) -> RequestHead:
    document = parse_json(text)
    request_id = expect(document, "id", str, "the request")
    parameters = expect(document, "parameters", dict, "the request", {})
    given = _objects(document, "inputs")
    names = [expect(tensor, "name", str, "an input", "") for tensor in given]
    try:
        check_names(names, forms)
    except DataError as error:
        raise RequestError(400, str(error)) from None
    inputs: dict[str, BinaryInput | Array] = {}
    used = 0
    wanted = {form.name: form for form in forms}
    for name, tensor in zip(names, given, strict=True):
        inputs[name], count = _read_input(tensor, wanted[name], used)
        used += count
    asked = _outputs(document, outputs, parameters.get("binary_data_output") is True)
    return RequestHead({form.name: inputs[form.name] for form in forms}, used, request_id, asked)


def write_reply(version: LoadedVersion, request: InferenceRequest, outputs: Sequence[Array]) -> HttpAnswer:
    """Returns the answer with the wanted outputs, as JSON, followed by those that are sent as binary data."""
    by_name = {form.name: (form, output) for form, output in zip(version.facts.outputs, outputs, strict=True)}
    described, blocks = [], []
    for name, as_binary in request.outputs:
        form, output = by_name[name]
        tensor: dict[str, Any] = {"name": name, "datatype": datatype(form), "shape": output.shape}
        if as_binary:
            blocks.append(np.ascontiguousarray(output).tobytes())
            tensor["parameters"] = {"binary_data_size": len(blocks[-1])}
        else:
            # orjson writes these types itself, float16 not.
            tensor["data"] = np.ascontiguousarray(
                output.ravel() if output.dtype != np.float16 else output.ravel().astype(np.float32)
            )
        described.append(tensor)
    document: dict[str, Any] = {"model_name": version.name, "model_version": str(version.number)}
    if request.id is not None:
        document["id"] = request.id
    text = orjson.dumps(document | {"outputs": described}, option=orjson.OPT_SERIALIZE_NUMPY)
    if not blocks:
        return HttpAnswer(text)
    headers = [(b"content-type", b"application/octet-stream"), (JSON_LENGTH, str(len(text)).encode())]
    return HttpAnswer(b"".join([text, *blocks]), 200, headers)


def _tensor_metadata(form: TensorForm) -> dict[str, Any]:
    return {"name": form.name, "datatype": datatype(form), "shape": list(form.shape)}


def _objects(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    items = expect(document, key, list, "the request", [])
    if any(type(item) is not dict for item in items):
        raise RequestError(400, f"{key} is a list of objects")
    return list(items)


def _read_input(given: Mapping[str, Any], form: TensorForm, begin: int) -> tuple[BinaryInput | Array, int]:
    """Returns an input, and how many bytes of the binary data it takes, from `begin` on."""
    where = f"input {form.name}"
    if given.get("datatype") != datatype(form):
        raise RequestError(400, f"{where}: datatype {given.get('datatype')!r:.40}, expected {datatype(form)!r}")
    shape = require(given, "shape", list, where)
    if any(type(length) is not int or length < 0 for length in shape) or len(shape) > 32:
        raise RequestError(400, f"{where}: expected a shape of whole numbers from 0 on, for {form_text(form)}")
    size = expect(expect(given, "parameters", dict, where, {}), "binary_data_size", int, where)
    if math.prod(length or 1 for length in shape) > _MOST_ELEMENTS:
        raise RequestError(400, f"{where}: the shape is too large, even where it has no element")
    if not fits(form, shape):
        raise RequestError(400, f"{where}: expected {form_text(form)}, got the shape {tuple(shape)}")
    count = math.prod(shape)
    try:
        if size is not None:
            dtype = numpy_type(form)
            if size != count * dtype.itemsize:
                wanted = count * dtype.itemsize
                raise RequestError(400, f"{where}: binary_data_size {size}, its shape and type take {wanted} bytes")
            return BinaryInput(form, dtype.newbyteorder("<"), tuple(shape), begin, count), size
        if "data" not in given:
            raise RequestError(400, f"{where}: has neither data nor parameters.binary_data_size")
        array = typed(form, require(given, "data", list, where))
        if array.size != count:
            raise RequestError(400, f"{where}: shape {shape} has {count} elements, data has {array.size}")
        return array.reshape(shape), 0
    except DataError as error:
        raise RequestError(400, f"{where}: {error}") from None


def _outputs(document: Mapping[str, Any], forms: Sequence[TensorForm], binary: bool) -> list[tuple[str, bool]]:
    asked = _objects(document, "outputs")
    if not asked:
        return [(form.name, binary) for form in forms]
    known = {form.name for form in forms}
    chosen: list[tuple[str, bool]] = []
    for output in asked:
        name = expect(output, "name", str, "an output", "")
        if name not in known or name in (other for other, _ in chosen):
            raise RequestError(
                400, f"output {name[:40]!r} is unknown or named twice; expected {', '.join(map(form_text, forms))}"
            )
        wanted = expect(expect(output, "parameters", dict, f"output {name}", {}), "binary_data", bool, f"output {name}")
        chosen.append((name, binary if wanted is None else wanted))
    return chosen
