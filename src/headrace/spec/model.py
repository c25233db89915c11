"""A model for planning: names, shapes and types, no tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.errors import UnknownName, UsageError
from headrace.spec.compute import BatchProfile, ComputeProfile, LayerSpec
from headrace.spec.embedding import TableSpec
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.tables import check_keys, number, read_json, read_toml, tables, text, whole

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
"""Bytes of one element by the name of its type, as in `torch.float32`."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter or buffer.

    Attributes:
        name: as in `named_parameters()`; of tied weights the first name.
        dtype: a key of `ITEM_BYTES`.
        trainable: False for frozen parameters and buffers.
        cut: the dim along which each device of a replica holds an equal part, if a strategy must know it before the
            run; None for a whole parameter.
        channels_last: whether the elements of its shape `(N, C, H, W)` lie in memory as those of `(N, H, W, C)`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    cut: int | None = None
    channels_last: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.elements * ITEM_BYTES[self.dtype]

    def part(self, devices: int) -> ParameterSpec:
        """Returns what each of `devices` devices holds of it: everything, if it is not cut."""
        shape = tuple(length // devices if dim == self.cut else length for dim, length in enumerate(self.shape))
        return replace(self, shape=shape, cut=None)


@dataclass(frozen=True)
class OptimizerNeeds:
    """What a job's optimizer needs, as its probe has found.

    Attributes:
        coupled: what makes the update of one parameter depend on others; empty where none does.
        at_once: whether a process must update all that it has in one call of `step()`.
        values: whether the constructor looks at the parameters' values.
        modes: whether it has a train and an eval mode.
        unsaved: why a checkpoint cannot hold its state; empty where one can.
        random: whether a step draws random numbers.
        gradients: whether a step fails where a parameter has no gradient.
        placed: whether the state that its constructor makes goes by where an element is in its parameter.
    """

    coupled: str = ""
    at_once: bool = False
    values: bool = False
    modes: bool = False
    unsaved: str = ""
    random: bool = False
    gradients: bool = False
    placed: bool = False

    @property
    def remedy(self) -> str:
        """The strategies that can do with one that is coupled."""
        if self.random:
            return "use one_device, or parameter_averaging, where each worker draws its own"
        return (
            "use one that updates all parameters in one process: one_device, mirrored, central_storage, "
            "parameter_averaging, or parameter_server with servers=1"
        )


@dataclass(frozen=True)
class ModelSpec:
    """A model as the strategies see it.

    Attributes:
        parameters: every parameter once, in the model's order, frozen ones included.
        buffers: every buffer that a checkpoint contains.
        sliceable: whether the job's optimizer treats every element alone, so that a parameter may be cut
            between owners (SGD and Adam may be cut; Muon and Adafactor need whole matrices).
        optimizer: what else the job's optimizer needs.
        layers: in the order of forward; only for strategies that cut the model between them.
        copies: memory of a trained parameter as a multiple of its size: itself, its gradient, and the optimizer state.
        name: for people.
        compute: how long a step takes; None where that was not measured.
        flops_per_example: floating-point operations of the forward pass; 0 where they are not known.
        origin: what a profile belongs to, such as "torch", "machine" and "digest" of the model; empty if a person has
            written it.
        tables: of embeddings with `sparse=True`, whose rows travel one by one; they are no parameters.

    Examples:
        >>> model = hr.ModelSpec.load("model.toml")
        >>> model.name
        'resnet50'
    """

    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...] = ()
    sliceable: bool = True
    layers: tuple[LayerSpec, ...] = ()
    copies: int = 3
    name: str = ""
    compute: ComputeProfile | None = None
    flops_per_example: float = 0.0
    origin: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[TableSpec, ...] = ()
    optimizer: OptimizerNeeds = OptimizerNeeds()

    @property
    def trainable(self) -> tuple[ParameterSpec, ...]:
        """The parameters that get a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters together."""
        return sum(parameter.bytes for parameter in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(parameter.bytes for parameter in self.trainable)

    def in_channels_last(self) -> ModelSpec:
        """Returns the model with its 4-d parameters in channels-last order."""
        parameters = tuple(replace(each, channels_last=len(each.shape) == 4) for each in self.parameters)
        return replace(self, parameters=parameters)

    @staticmethod
    def load(path: Path | str) -> ModelSpec:
        """Reads a profile (.json), or a file that a person has written (.toml) like docs/guide/simulate.md's.

        Raises:
            UsageError: the file cannot be read, has a key or a value that it must not have, or does not say how long a
                step takes; with the file and the key.
        """
        written = Path(path).suffix == ".toml"
        document = read_toml(path, "a model's file") if written else read_json(path, "a model's file")
        try:
            return _written(document) if written else from_plain(ModelSpec, document)
        except (UsageError, TypeError) as error:
            raise UsageError(f"{path}: {error}") from None

    def save(self, path: Path | str) -> None:
        """Writes the JSON file that `load` reads."""
        Path(path).write_text(json.dumps(to_plain(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ProfileRequest:
    """How to measure the layers of a model for a strategy: on a micro-batch of so many examples.

    `threads` is that of each worker; 0 for all threads of the machine.
    """

    examples: int
    threads: int = 0


_STEP = ("batch_size", "examples_per_s", "forward_ms", "backward_ms", "activation_mb")
_LAYER = ("name", "parameters", "parameter_mb", "forward_ms", "backward_ms", "crossing_mb", "activation_mb")
_SIZES = ("parameters", "parameter_mb")
_FIXED = ("optimizer_ms", "fixed_ms", "accumulate_ms", "spread", "device")
_MODEL = ("name", "dtype", "copies", "flops_per_example", *_SIZES, *_STEP, *_FIXED, "measured", "layers")
# Far above what there is: 100 trillion parameters, or 1 EFLOP for an example.
_MOST_PARAMETERS, _MOST_FLOPS = 1e14, 1e18


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
    for place, each in enumerate(named):
        if first.setdefault(each.name, place) != place:
            raise UsageError(f"layers[{first[each.name]}] and layers[{place}] have one name, {each.name!r}")
    parameters = tuple(each for each in named if each.elements) or (
        ParameterSpec("parameters", (_elements(document, "", dtype),), dtype),
    )
    if not any(each.elements for each in parameters):
        raise UsageError("the model has no parameter; parameter_mb is in millions of bytes")
    flops = number(document, "flops_per_example", "", 0.0, most=_MOST_FLOPS)
    compute = _compute(document, named)
    if compute is None and not flops:
        raise UsageError(
            "nothing says how long a step takes; give batch_size and examples_per_s, or batch_size, forward_ms and "
            "backward_ms, or flops_per_example"
        )
    return ModelSpec(
        parameters,
        layers=compute.batches[0].layers if compute else (),
        copies=whole(document, "copies", "", 3),
        name=text(document, "name", "", "model"),
        compute=compute,
        flops_per_example=flops,
    )


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
    own = _own_batch(document, named, besides_s)
    batches = [] if own is None else [own]
    for place, item in enumerate(tables(document, "measured")):
        batches.append(_another_batch(item, f"measured[{place}]", besides_s, own))
    if not batches:
        return None
    batches.sort(key=lambda batch: batch.examples)
    spread, device = number(document, "spread", "", 0.0, most=10.0), text(document, "device", "", "")
    return ComputeProfile(tuple(batches), optimizer_s, fixed_s, spread, device, accumulate_s=accumulate_s)


def _own_batch(document: Mapping[str, Any], named: list[ParameterSpec], besides_s: float) -> BatchProfile | None:
    """Returns the batch that the file says by itself, by its layers where it has some; None if it says none."""
    items = tables(document, "layers")
    if "batch_size" not in document and not items:
        return None
    size = whole(document, "batch_size", "")
    if not items:
        saved = round(number(document, "activation_mb", "", 0.0) * 1e6)
        return BatchProfile(size, *_times(document, "", size, besides_s), saved)
    layers = tuple(_layer(each, place, spec) for place, (each, spec) in enumerate(zip(items, named, strict=True)))
    times = sum(each.forward_s for each in layers), sum(each.backward_s for each in layers)
    return BatchProfile(size, *times, sum(each.saved_bytes for each in layers), layers)


def _another_batch(item: Mapping[str, Any], where: str, besides_s: float, own: BatchProfile | None) -> BatchProfile:
    """Returns a batch of [[measured]]; what it does not say of bytes and layers is in proportion to the file's own."""
    check_keys(item, _STEP, where)
    size = whole(item, "batch_size", where)
    forward_s, backward_s = _times(item, where, size, besides_s)
    if own is None:
        return BatchProfile(size, forward_s, backward_s, round(number(item, "activation_mb", where, 0.0) * 1e6))
    larger = size / own.examples
    saved = round(number(item, "activation_mb", where, own.saved_bytes * larger / 1e6) * 1e6)

    def part(whole_s: float, layer_s: float, own_s: float) -> float:
        return whole_s * layer_s / own_s if own_s else 0.0

    layers = tuple(
        replace(
            each,
            forward_s=part(forward_s, each.forward_s, own.forward_s),
            backward_s=part(backward_s, each.backward_s, own.backward_s),
            saved_bytes=round(part(saved, each.saved_bytes, own.saved_bytes)),
            crossing_bytes=round(each.crossing_bytes * larger),
        )
        for each in own.layers
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
