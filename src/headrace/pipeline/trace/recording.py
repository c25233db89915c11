"""A recorded forward, how its parts are run again, and the proxies that stand for values while it is recorded."""

from __future__ import annotations

import inspect
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx, nn

from headrace.trees import map_leaves, map_tensors

_len, _isinstance = len, isinstance
"""The builtins themselves, not what replaces them while a forward is recorded."""

_SETTLED = (torch.dtype, torch.device, torch.layout, bool, type(None))
"""What an attribute of a tensor may be that is the same for every batch."""


class Untraceable(Exception):
    """Something in forward cannot be recorded."""

    def __init__(self, owner: nn.Module, reason: str) -> None:
        super().__init__(reason)
        self.owner = owner
        self.reason = reason


@dataclass
class Recording:
    """A forward.

    Attributes:
        graph: what is done, in order. A `get_attr` reads a tensor or `training`; the output is a list of leaves.
        guards: nodes whose values forward has asked for, and what they must be in every run.
        gradless: nodes under `torch.no_grad`.
        writes: (writer, node whose value it writes to).
        written: (writer, name of the buffer that it writes to).
        constants: tensors that forward has created, by the `get_attr` that reads them.
        inputs: placeholders by the place of a tensor in the arguments of forward, "images" or "batch['text'][0]".
        settled: what else there is in the arguments, by its place.
        output: the tree that forward returns, with indices into the leaves in their place.
        recomputes: whether it has used `torch.utils.checkpoint`, which is left out.
    """

    module: nn.Module
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    guards: dict[fx.Node, Any] = field(default_factory=dict)
    owners: dict[fx.Node, nn.Module] = field(default_factory=dict)
    gradless: set[fx.Node] = field(default_factory=set)
    writes: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    written: list[tuple[fx.Node, str]] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    settled: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    recomputes: bool = False

    def fetch(self, path: str) -> Any:
        """Returns what a `get_attr` reads."""
        if path in self.constants:
            return self.constants[path]
        parent, _, name = path.rpartition(".")
        return getattr(self.module.get_submodule(parent), name)


def execute(recording: Recording, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a node that is neither a placeholder nor the output."""
    target: Any = node.target
    with torch.no_grad() if node in recording.gradless else nullcontext():
        if node.op == "call_module":
            return recording.module.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "call_function":
            return target(*args, **kwargs)
        return recording.fetch(target)


def answer(value: Any) -> Any:
    """Returns what a guard holds of a value: the length of what is taken apart, else the value itself."""
    return len(value) if isinstance(value, tuple | list | dict) and not isinstance(value, torch.Size) else value


def places(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors in the arguments of a forward, and what else there is, by their places."""
    found: dict[str, Tensor] = {}
    settled: dict[str, Any] = {}

    def put(name: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            found[name] = leaf
        else:
            settled[name] = leaf

    for name, value in inspect.signature(module.forward).bind(*args, **kwargs).arguments.items():
        map_leaves(put, value, name)
    return found, settled


def tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors of a tree."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


class RecordingTracer(fx.Tracer, ABC):
    """What a `ValueProxy` asks of the tracer that made it."""

    recording: Recording

    @abstractmethod
    def settle(self, proxy: fx.Proxy) -> Any:
        """Returns a proxy's value, and makes a guard of it: every later run must have the same."""

    @abstractmethod
    def refuse(self, reason: str) -> NoReturn:
        """Raises `Untraceable` for the module whose forward runs."""


class ValueProxy(fx.Proxy):
    """Stands for a value in forward, knows the value for the examples, and answers forward's questions with it."""

    tracer: RecordingTracer

    def __getattr__(self, name: str) -> Any:
        held = getattr(value_of(self), name)
        if name == "requires_grad":
            self.tracer.refuse("it asks whether a tensor requires a gradient")
        if isinstance(held, _SETTLED):
            return held
        if callable(held) and not isinstance(held, Tensor):
            return partial(self._call, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __iter__(self) -> Iterator[Any]:
        return iter([item_of(self, index) for index in range(len(self))])

    def __len__(self) -> int:
        length = self.tracer.create_proxy("call_function", _len, (self,), {})
        return int(self.tracer.settle(length))

    def __bool__(self) -> bool:
        return bool(self.tracer.settle(self))

    def __index__(self) -> int:
        return int(self.tracer.settle(self))

    def __int__(self) -> int:
        return int(self.tracer.settle(self))

    def __float__(self) -> float:
        return float(self.tracer.settle(self))

    def __contains__(self, item: Any) -> bool:
        return item in self.tracer.settle(self)

    def __hash__(self) -> int:
        return id(self)

    def __format__(self, spec: str) -> str:
        return format(value_of(self), spec)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", name, (self, *args), kwargs)


def value_of(proxy: fx.Proxy) -> Any:
    """Returns what a proxy stands for."""
    return cast(RecordingTracer, proxy.tracer).recording.values[proxy.node]


def is_instance(value: Any, kinds: Any) -> bool:
    """Says of a proxy what `isinstance` says of what it stands for.

    A `__class__` of its own would tell torch's C++, too, which then takes the proxy's memory for a tensor's.
    """
    return _isinstance(value, kinds) or (type(value) is ValueProxy and _isinstance(value_of(value), kinds))


def item_of(proxy: fx.Proxy, key: Any) -> Any:
    """Returns a part of what a proxy stands for."""
    return proxy.tracer.create_proxy("call_function", operator.getitem, (proxy, key), {})


def _in_place(name: str) -> None:
    def write(self: ValueProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    setattr(ValueProxy, f"__{name}__", write)


for _name in ("iadd", "iand", "ifloordiv", "imod", "imul", "ior", "ipow", "isub", "itruediv", "ixor"):
    # torch.fx takes x += y for x = x + y, which other views of x's memory would not see.
    _in_place(_name)
