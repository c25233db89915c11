"""A model for planning: names, shapes and types, no tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.registry import imported
from headrace.spec.compute import ComputeProfile, ExpertSpec, LayerSpec, SlicedProfile, StepsToGoal, TokenUse, Traffic
from headrace.spec.embedding import TableSpec
from headrace.spec.plain import to_plain

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
        in_parts: whether each process makes a parameter when it needs it, and none builds the whole model.
        tokens: what forward does with the tokens of a sequence; only for strategies that divide sequences.
        slices: what tensor parallelism makes of it on so many devices, by number of devices; () where it was not tried.
        experts: the parameters of experts, by name; only for strategies that divide these.
        traffic: what workers that divide sequences, experts or parameters exchange in a step; None where not counted.
        to_goal: how many steps its job takes to a goal; None where that was not measured.

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
    in_parts: bool = False
    tokens: TokenUse | None = None
    slices: tuple[SlicedProfile, ...] = ()
    experts: Mapping[str, ExpertSpec] = field(default_factory=dict)
    traffic: Traffic | None = None
    to_goal: StepsToGoal | None = None

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
        parameters = tuple(replace(parameter, channels_last=len(parameter.shape) == 4) for parameter in self.parameters)
        return replace(self, parameters=parameters)

    @staticmethod
    def load(path: Path | str) -> ModelSpec:
        """Reads a profile (.json), or a file that a person has written (.toml) like docs/guide/simulate.md's.

        Raises:
            UsageError: the file cannot be read, has a key or a value that it must not have, or does not say how long a
                step takes; with the file and the key.
        """
        model: ModelSpec = imported("headrace.spec.files.models:read")(path)
        return model

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
