"""The file of a model: its profile, or what a person has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.errors import UnknownName, UsageError
from headrace.spec.compute import BatchProfile, ComputeProfile, LayerSpec, StepsToGoal
from headrace.spec.files.tables import check_keys, flag, number, read_json, read_toml, tables, text, whole
from headrace.spec.model import ITEM_BYTES, ModelSpec, ParameterSpec
from headrace.spec.plain import from_plain

_STEP = ("batch_size", "examples_per_s", "forward_ms", "backward_ms", "activation_mb")
_LAYER = ("name", "parameters", "parameter_mb", "forward_ms", "backward_ms", "crossing_mb", "activation_mb")
_SIZES = ("parameters", "parameter_mb")
_GOAL = ("goal", "global_batch_size", "steps", "critical_batch")
_FIXED = ("optimizer_ms", "fixed_ms", "accumulate_ms", "spread", "varied_lengths", "device")
_MODEL = ("name", "dtype", "copies", "flops_per_example", *_SIZES, *_STEP, *_FIXED, "measured", "layers", "goal")
# Far above what there is: 100 trillion parameters, or 1 EFLOP for an example.
_MOST_PARAMETERS, _MOST_FLOPS = 1e14, 1e18
# Four times the peak of the quickest device of 2026 in half precision.
_MOST_DEVICE_FLOPS = 1e16


def read(path: Path | str) -> ModelSpec:
    """See `ModelSpec.load`."""
    if Path(path).suffix == ".py":
        remedy = f"measure it by headrace profile {path} -o model.json"
        raise UsageError(f"{path} is a program, and does not say how long a step takes; {remedy}")
    written = Path(path).suffix == ".toml"
    document = read_toml(path, "a model's file") if written else read_json(path, "a model's file")
    try:
        return _written(document) if written else from_plain(ModelSpec, document)
    except (UsageError, TypeError) as error:
        raise UsageError(f"{path}: {error}") from None


def _written(document: Mapping[str, Any]) -> ModelSpec:
    check_keys(document, _MODEL, "the file")
    dtype = text(document, "dtype", "", "float32")
    if dtype not in ITEM_BYTES:
        raise UnknownName("dtype", dtype, ITEM_BYTES, "the file")
    items = tables(document, "layers")
    named = [
        ParameterSpec(text(item, "name", f"layers[{place}]"), (_elements(item, f"layers[{place}]", dtype),), dtype)
        for place, item in enumerate(items)
    ]
    first: dict[str, int] = {}
    for place, parameter in enumerate(named):
        if first.setdefault(parameter.name, place) != place:
            raise UsageError(f"layers[{first[parameter.name]}] and layers[{place}] have one name, {parameter.name!r}")
    parameters = tuple(parameter for parameter in named if parameter.elements) or (
        ParameterSpec("parameters", (_elements(document, "", dtype),), dtype),
    )
    if not any(parameter.elements for parameter in parameters):
        raise UsageError("the model has no parameter; parameter_mb is in millions of bytes")
    flops = number(document, "flops_per_example", "", 0.0, most=_MOST_FLOPS)
    compute = _compute(document, named)
    if compute is None and not flops:
        raise UsageError(
            "nothing says how long a step takes; give batch_size and examples_per_s, or batch_size, forward_ms and "
            "backward_ms, or flops_per_example"
        )
    for batch in compute.batches if compute else ():
        # Backward makes two gradients where forward makes one output.
        attained = 3 * flops * batch.examples / (batch.forward_s + batch.backward_s)
        if attained > _MOST_DEVICE_FLOPS:
            raise UsageError(
                f"a batch of {batch.examples} with flops_per_example = {flops:g} in "
                f"{1e3 * (batch.forward_s + batch.backward_s):g} ms is {attained / 1e12:,.0f} TFLOP/s, forward and "
                f"twice as much backward, and no device does {_MOST_DEVICE_FLOPS / 1e12:,.0f}; correct one of them"
            )
    return ModelSpec(
        parameters,
        layers=compute.batches[0].layers if compute else (),
        copies=whole(document, "copies", "", 3),
        name=text(document, "name", "", "model"),
        compute=compute,
        flops_per_example=flops,
        to_goal=_to_goal(document),
    )


def _to_goal(document: Mapping[str, Any]) -> StepsToGoal | None:
    item = document.get("goal")
    if item is None:
        return None
    if not isinstance(item, Mapping):
        raise UsageError(f"goal must be a table, [goal], got {item!r:.60}")
    check_keys(item, _GOAL, "goal")
    steps, batch = (whole(item, key, "goal") for key in ("steps", "global_batch_size"))
    return StepsToGoal(text(item, "goal", "goal"), batch, steps, number(item, "critical_batch", "goal"))


def _elements(item: Mapping[str, Any], where: str, dtype: str) -> int:
    if all(key in item for key in _SIZES) or not any(key in item for key in _SIZES):
        raise UsageError(f"{where} needs either parameters or parameter_mb".removeprefix(" "))
    if "parameters" in item:
        return round(number(item, "parameters", where, most=_MOST_PARAMETERS))
    return round(number(item, "parameter_mb", where, most=_MOST_PARAMETERS / 1e6) * 1e6) // ITEM_BYTES[dtype]


def _compute(document: Mapping[str, Any], named: list[ParameterSpec]) -> ComputeProfile | None:
    optimizer_s, fixed_s, accumulate_s = (
        number(document, key, "", 0.0) / 1e3 for key in ("optimizer_ms", "fixed_ms", "accumulate_ms")
    )
    besides_s = optimizer_s + fixed_s
    first = _own_batch(document, named, besides_s)
    batches = [] if first is None else [first]
    for place, item in enumerate(tables(document, "measured")):
        batches.append(_another_batch(item, f"measured[{place}]", besides_s, first))
    if not batches:
        return None
    batches.sort(key=lambda batch: batch.examples)
    spread = number(document, "spread", "", most=10.0) if "spread" in document else None
    varied = flag(document, "varied_lengths", "")
    device = text(document, "device", "", "")
    return ComputeProfile(
        tuple(batches), optimizer_s, fixed_s, spread, device, accumulate_s=accumulate_s, varied=varied
    )


def _own_batch(document: Mapping[str, Any], named: list[ParameterSpec], besides_s: float) -> BatchProfile | None:
    """Returns the batch that the file says by itself, by its layers where it has some; None if it says none."""
    items = tables(document, "layers")
    if "batch_size" not in document and not items:
        return None
    size = whole(document, "batch_size", "")
    if not items:
        saved = round(number(document, "activation_mb", "", 0.0) * 1e6)
        return BatchProfile(size, *_times(document, "", size, besides_s), saved)
    layers = tuple(_layer(item, place, spec) for place, (item, spec) in enumerate(zip(items, named, strict=True)))
    times = sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)
    return BatchProfile(size, *times, sum(layer.saved_bytes for layer in layers), layers)


def _another_batch(item: Mapping[str, Any], where: str, besides_s: float, first: BatchProfile | None) -> BatchProfile:
    """Returns a batch of [[measured]]; what it does not say of bytes and layers is in proportion to the file's own."""
    check_keys(item, _STEP, where)
    size = whole(item, "batch_size", where)
    forward_s, backward_s = _times(item, where, size, besides_s)
    if first is None:
        return BatchProfile(size, forward_s, backward_s, round(number(item, "activation_mb", where, 0.0) * 1e6))
    larger = size / first.examples
    saved = round(number(item, "activation_mb", where, first.saved_bytes * larger / 1e6) * 1e6)

    def part(whole_s: float, layer_s: float, own_s: float) -> float:
        return whole_s * layer_s / own_s if own_s else 0.0

    layers = tuple(
        replace(
            layer,
            forward_s=part(forward_s, layer.forward_s, first.forward_s),
            backward_s=part(backward_s, layer.backward_s, first.backward_s),
            saved_bytes=round(part(saved, layer.saved_bytes, first.saved_bytes)),
            crossing_bytes=round(layer.crossing_bytes * larger),
        )
        for layer in first.layers
    )
    return BatchProfile(size, forward_s, backward_s, saved, layers)


def _times(item: Mapping[str, Any], where: str, size: int, besides_s: float) -> tuple[float, float]:
    """Returns the seconds of forward and backward."""
    if "examples_per_s" not in item:
        return number(item, "forward_ms", where) / 1e3, number(item, "backward_ms", where) / 1e3
    rate = number(item, "examples_per_s", where)
    step_s = size / rate - besides_s if rate else 0.0
    if step_s <= 0:
        raise UsageError(
            f"{where}.examples_per_s is {rate:g}: a step of {size} examples would leave no time for forward and "
            f"backward beside the {1e3 * besides_s:g} ms of optimizer_ms and fixed_ms".removeprefix(".")
        )
    # Backward makes two gradients where forward makes one output.
    return step_s / 3, 2 * step_s / 3


def _layer(item: Mapping[str, Any], place: int, parameter: ParameterSpec) -> LayerSpec:
    where = f"layers[{place}]"
    check_keys(item, _LAYER, where)
    return LayerSpec(
        name=parameter.name,
        parameters=(parameter.name,) if parameter.elements else (),
        parameter_bytes=parameter.bytes,
        forward_s=number(item, "forward_ms", where) / 1e3,
        backward_s=number(item, "backward_ms", where) / 1e3,
        saved_bytes=round(number(item, "activation_mb", where, 0.0) * 1e6),
        crossing_bytes=round(number(item, "crossing_mb", where, 0.0) * 1e6),
    )
