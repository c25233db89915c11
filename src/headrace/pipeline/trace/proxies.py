"""Proxies that stand for values while a forward is recorded, and know these values for the examples."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

_len, _isinstance = len, isinstance
"""The builtins themselves, not what replaces them while a forward is recorded."""

_SETTLED = (torch.dtype, torch.device, torch.layout, bool, type(None))
"""What an attribute of a tensor may be that is the same for every batch."""


class ValueProxy(fx.Proxy):
    """Stands for a value in forward, knows the value for the examples, and answers forward's questions with it."""

    tracer: Any  # a Recorder, whose module imports this one

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
        # A table by sizes is looked up with a size, and one by tensors with the tensor itself.
        return id(self) if _isinstance(value_of(self), Tensor) else hash(self.tracer.settle(self))

    def __format__(self, spec: str) -> str:
        return format(self.tracer.settle(self), spec)

    def __repr__(self) -> str:
        return repr(self.tracer.settle(self))

    def __str__(self) -> str:
        return str(self.tracer.settle(self))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", name, (self, *args), kwargs)


def value_of(proxy: fx.Proxy) -> Any:
    """Returns what a proxy stands for."""
    recorder: Any = proxy.tracer
    return recorder.recording.values[proxy.node]


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
