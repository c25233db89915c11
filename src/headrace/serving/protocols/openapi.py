"""The server's addresses as an OpenAPI document, with the names, types and shapes of the models that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.export.signature import TensorForm
from headrace.serving.catalog import Catalog, LoadedVersion, ServedModel
from headrace.serving.protocols.open_inference import datatype

_ERROR = {"$ref": "#/components/schemas/Error"}
_STATUS = {
    "400": "the request is wrong; the text says what was expected",
    "401": "the token is missing or wrong",
    "403": "the Host header names another machine",
    "404": "there is no such model or version",
    "405": "another method",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "422": "the model cannot compute this input, or returns NaN or infinity",
    "429": "too many requests wait; Retry-After says when to come again",
    "503": "no version is loaded, or the server is about to end",
}
_EVERY = ("401", "403", "405")

Document = dict[str, Any]


def openapi_document(catalog: Catalog, version: str, with_token: bool) -> Document:
    """Returns the document of OpenAPI 3.1."""
    models = [model for _, model in sorted(catalog.models.items()) if model.versions]
    paths: Document = {}
    for model in models:
        for path, operations in _paths(model):
            paths[path] = operations
        for what, told in (("load", "Looks for new versions at once"), ("unload", "Refused: the folder says")):
            path = f"/v2/repository/models/{model.name}/{what}"
            paths[path] = {"post": _post(f"{told}: {model.name}", {"type": "object"}, {"type": "object"})}
    paths |= {
        "/v2": {"get": _get("Name, version and extensions of the server", _SERVER)},
        "/v2/models": {"get": _get("All models", _object(models={"type": "array", "items": _METADATA}), "503")},
        "/v2/repository/index": {"post": _post("Versions, and why some are not loaded", _INDEXED, _INDEX)},
        "/v2/health/live": {"get": _get("Whether the server answers", _object(live={"const": True}))},
        "/v2/health/ready": {"get": _get("Whether every model is loaded", _object(ready={"const": True}), "503")},
        "/metrics": {"get": _get("Counters and histograms for Prometheus", {"type": "string"}, kind="text/plain")},
        "/openapi.json": {"get": _get("This document", {"type": "object"})},
        "/": {"get": _get("A page to try the models", {"type": "string"}, kind="text/html")},
    }
    document: Document = {
        "openapi": "3.1.0",
        "info": {"title": "headrace serve", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": _object(error={"type": "string"})}},
    }
    if with_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _paths(model: ServedModel) -> Iterator[tuple[str, Document]]:
    places = [("", model.newest())]
    places += [(f"/versions/{number}", loaded) for number, loaded in sorted(model.versions.items())]
    gone = ("404", "503")
    for place, version in places:
        of = f"{model.name}{place and f', version {version.number}'}"
        infer, predict = f"/v2/models/{model.name}{place}", f"/v1/models/{model.name}{place}"
        yield f"{infer}/infer", {"post": _post(f"Predictions of {of}", _infer(version), _INFERRED)}
        yield infer, {"get": _get(f"Inputs and outputs of {of}", _METADATA, *gone)}
        yield f"{infer}/signature.json", {"get": _get(f"What {of} is, as exported", {"type": "object"}, *gone)}
        sample = _get(f"Examples and answers of {of}", _BYTES, *gone, kind="application/octet-stream")
        yield f"{infer}/sample.safetensors", {"get": sample}
        yield f"{infer}/ready", {"get": _get(f"Whether {of} is loaded", _READY, *gone)}
        yield f"{predict}:predict", {"post": _post(f"Predictions of {of}", _predict(version), _predicted())}
        yield predict, {"get": _get(f"Versions of {of}", _VERSIONS, *gone)}
        yield f"{predict}/metadata", {"get": _get(f"Task, labels and metrics of {of}", {"type": "object"}, *gone)}


def _get(summary: str, schema: Document, *statuses: str, kind: str = "application/json") -> Document:
    return {"summary": summary, "responses": _responses(schema, statuses, kind)}


def _post(summary: str, body: Document, schema: Document) -> Document:
    statuses = ("400", "404", "408", "413", "422", "429", "503")
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _responses(schema, statuses, "application/json"),
    }


def _responses(schema: Document, statuses: Sequence[str], kind: str) -> Document:
    responses: Document = {"200": {"description": "answered", "content": {kind: {"schema": schema}}}}
    for status in sorted({*statuses, *_EVERY}):
        responses[status] = {"description": _STATUS[status], "content": {"application/json": {"schema": _ERROR}}}
    return responses


def _object(required: Sequence[str] | None = None, /, **properties: Any) -> Document:
    return {"type": "object", "properties": properties, "required": list(properties if required is None else required)}


def _infer(version: LoadedVersion) -> Document:
    forms = version.facts.inputs
    inputs = {
        "type": "array",
        "items": {"anyOf": [_input(form) for form in forms]},
        "minItems": len(forms),
        "maxItems": len(forms),
    }
    outputs = {
        "type": "array",
        "items": _object(name={"enum": [form.name for form in version.facts.outputs]}),
        "maxItems": len(version.facts.outputs),
    }
    return _object(["inputs"], id={"type": "string"}, inputs=inputs, outputs=outputs)


def _input(form: TensorForm) -> Document:
    lengths = [{"type": "integer", "minimum": 0} if length < 0 else {"const": length} for length in form.shape]
    shape = {"type": "array", "prefixItems": lengths, "minItems": len(lengths), "maxItems": len(lengths)}
    return _object(
        name={"const": form.name}, datatype={"const": datatype(form)}, shape=shape, data=_values(form, len(form.shape))
    )


def _predict(version: LoadedVersion) -> Document:
    forms = version.facts.inputs
    one = {form.name: _nested(form, form.shape[1:]) for form in forms}
    all_ = {form.name: _nested(form, form.shape) for form in forms}
    instance: Document = _object(**one)
    inputs: Document = _object(**all_)
    if len(forms) == 1:
        instance = {"anyOf": [instance, one[forms[0].name]]}
        inputs = {"anyOf": [inputs, all_[forms[0].name]]}
    instances = {"type": "array", "items": instance, "minItems": 1}
    name = {"enum": ["", "serving_default"]}
    return {
        "oneOf": [
            _object(["instances"], instances=instances, signature_name=name),
            _object(["inputs"], inputs=inputs, signature_name=name),
        ]
    }


def _nested(form: TensorForm, shape: Sequence[int]) -> Document:
    schema = _number(form)
    for length in reversed(shape):
        bounds = {} if length < 0 else {"minItems": length, "maxItems": length}
        schema = {"type": "array", "items": schema, **bounds}
    return schema


def _values(form: TensorForm, depth: int) -> Document:
    """Returns the schema of flat values; nested ones of the same shape are understood, too."""
    return {"type": "array", "items": {"anyOf": [_number(form), {"type": "array"}]} if depth > 1 else _number(form)}


def _number(form: TensorForm) -> Document:
    kinds: Mapping[str, str] = {"bool": "boolean", "float": "number"}
    return {"type": kinds.get(form.dtype.rstrip("0123456789"), "integer")}


_TENSORS: Document = {
    "type": "array",
    "items": _object(
        name={"type": "string"},
        datatype={"type": "string"},
        shape={"type": "array", "items": {"type": "integer", "minimum": -1}},
    ),
}
_SERVER = _object(
    name={"const": "headrace"}, version={"type": "string"}, extensions={"type": "array", "items": {"type": "string"}}
)
_METADATA = _object(
    name={"type": "string"},
    versions={"type": "array", "items": {"type": "string"}},
    platform={"type": "string"},
    inputs=_TENSORS,
    outputs=_TENSORS,
)
_BYTES: Document = {"type": "string", "format": "binary"}
_INDEXED = _object([], ready={"type": "boolean"})
_INDEX: Document = {
    "type": "array",
    "items": _object(**{name: {"type": "string"} for name in ("name", "version", "state", "reason")}),
}
_READY = _object(name={"type": "string"}, version={"type": "string"}, ready={"const": True})
_VERSIONS = _object(
    model_version_status={
        "type": "array",
        "items": _object(version={"type": "string"}, state={"const": "AVAILABLE"}, status={"type": "object"}),
    }
)
_INFERRED = _object(
    ["model_name", "outputs"],
    model_name={"type": "string"},
    model_version={"type": "string"},
    id={"type": "string"},
    outputs={
        **_TENSORS,
        "items": _object(
            ["name", "datatype", "shape"],
            name={"type": "string"},
            datatype={"type": "string"},
            shape={"type": "array", "items": {"type": "integer", "minimum": 0}},
            data={"type": "array"},
        ),
    },
)


def _predicted() -> Document:
    return {"oneOf": [_object(predictions={"type": "array"}), _object(outputs={})]}
