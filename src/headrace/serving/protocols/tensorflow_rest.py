"""The REST form of TensorFlow Serving: `POST /v1/models/NAME:predict`.

https://www.tensorflow.org/tfx/serving/api_rest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.errors import DataError
from headrace.export.signature import TensorForm
from headrace.export.tensors import Array, check_names, form_text, shaped, typed
from headrace.serving.catalog import LoadedVersion, ServedModel
from headrace.serving.protocols.http import HttpAnswer, expect, json_reply, parse_json, require
from headrace.serving.settings import RequestError

_SIGNATURE = "serving_default"


def model_status(model: ServedModel, version: LoadedVersion | None) -> dict[str, Any]:
    """Returns the answer to `GET /v1/models/NAME`, of one version or of all."""
    numbers = sorted(model.versions) if version is None else [version.number]
    status = {"error_code": "OK", "error_message": ""}
    return {
        "model_version_status": [{"version": str(number), "state": "AVAILABLE", "status": status} for number in numbers]
    }


def read_predict(body: bytes, forms: Sequence[TensorForm]) -> tuple[dict[str, Array], bool]:
    """Returns the inputs of a request, and whether it has a row for each example ("instances").

    Raises:
        RequestError: 400 with what was expected, or 413.
    """
    document = parse_json(body)
    name = expect(document, "signature_name", str, "the request", _SIGNATURE)
    if name not in ("", _SIGNATURE):
        raise RequestError(400, f"signature_name {name[:40]!r}: the model has {_SIGNATURE!r} alone")
    in_rows = "instances" in document
    if in_rows == ("inputs" in document):
        raise RequestError(400, 'expected either "instances", a list of examples, or "inputs", a list for each input')
    columns = _columns(require(document, "instances", list, "the request")) if in_rows else document["inputs"]
    if not isinstance(columns, dict):
        if len(forms) != 1:
            raise RequestError(400, f"the model takes {', '.join(map(form_text, forms))}: name them")
        columns = {forms[0].name: columns}
    try:
        check_names(list(columns), forms)
        return {form.name: _array(form, columns[form.name]) for form in forms}, in_rows
    except DataError as error:
        raise RequestError(400, str(error)) from None


def write_predictions(version: LoadedVersion, outputs: Sequence[Array], in_rows: bool) -> HttpAnswer:
    """Returns `{"predictions": [...]}`, a value or an object for each example, or `{"outputs": ...}`."""
    arrays = {
        form.name: np.ascontiguousarray(output if output.dtype != np.float16 else output.astype(np.float32))
        for form, output in zip(version.facts.outputs, outputs, strict=True)
    }
    whole: Any = next(iter(arrays.values())) if len(arrays) == 1 else arrays
    if not in_rows or not version.batched:
        return json_reply({"outputs": whole})
    if len(arrays) > 1:
        columns = [array.tolist() for array in arrays.values()]
        whole = [dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True)]
    return json_reply({"predictions": whole})


def _array(form: TensorForm, values: Any) -> Array:
    array = typed(form, values)
    if array.ndim != len(form.shape):
        raise DataError(f"expected {form_text(form)}, got the shape {array.shape}")
    return shaped(form, array)


def _columns(rows: Sequence[Any]) -> Any:
    """Returns the values of each input where the rows name them, else the rows."""
    kinds = set(map(type, rows))
    if dict not in kinds:
        return rows
    if kinds != {dict}:
        raise RequestError(400, "instances are objects, or values, not both")
    names: Mapping[str, Any] = rows[0]
    if any(row.keys() != names.keys() for row in rows):
        raise RequestError(400, f"every instance has the same names, the first has {', '.join(list(names)[:20]):.300}")
    return {name: [row[name] for row in rows] for name in names}
