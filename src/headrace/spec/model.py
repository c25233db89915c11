"""A model for planning: names, shapes and types, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    cut: int | None = None

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
class LayerSpec:
    """One layer of a model that is cut into stages, as it was measured on a micro-batch.

    Attributes:
        parameters: names of those that it uses; several layers use a tied one.
        saved_bytes: what autograd keeps for this layer's backward and for no layer before it.
        crossing_bytes: of all values that are alive behind it: what crosses a cut there.
        joined: whether no cut may follow it.
    """

    name: str
    parameters: tuple[str, ...]
    parameter_bytes: int
    forward_s: float
    backward_s: float
    saved_bytes: int
    crossing_bytes: int
    joined: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model as the strategies see it.

    Attributes:
        parameters: every parameter once, in the model's order, frozen ones included.
        buffers: every buffer that a checkpoint contains.
        sliceable: whether the job's optimizer treats every element alone, so that a parameter may be cut
            between owners (SGD and Adam may be cut; Muon and Adafactor need whole matrices).
        layers: in the order of forward; only for strategies that cut the model between them.
        copies: memory of a trained parameter as a multiple of its size: itself, its gradient, and the optimizer state.
    """

    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...] = ()
    sliceable: bool = True
    layers: tuple[LayerSpec, ...] = ()
    copies: int = 3

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


@dataclass(frozen=True)
class ProfileRequest:
    """How to measure the layers of a model for a strategy: on a micro-batch of so many examples.

    `threads` is that of each worker; 0 for all threads of the machine.
    """

    examples: int
    threads: int = 0
