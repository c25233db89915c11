"""Proxies that stand for values while a forward is recorded, and know these values for the examples."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from headrace.trees import tensors_of

_len = len
"""The builtin itself, not what replaces it while a forward is recorded."""

_SETTLED = (torch.dtype, torch.device, torch.layout, bool, type(None))
"""What an attribute of a tensor may be that is the same for every batch."""


class ValueProxy(fx.Proxy):
    """Stands for a value in forward, knows the value for the examples, and answers forward's questions with it."""

    tracer: Any  # a Recorder, whose module imports this one

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` is answered with; of a proxy that forward has left somewhere, its own class."""
        return type(self.tracer.recording.values.get(self.node, self))

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

    @abstractmethod
    def __hash__(self) -> int: ...

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


class NumberProxy(ValueProxy):
    """A proxy of anything but a tensor: a size, a mode, a table."""

    def __hash__(self) -> int:
        # A table by sizes is looked up with a size.
        return hash(self.tracer.settle(self))


class TensorProxy(ValueProxy, Tensor):  # type: ignore[misc]
    """A proxy of a tensor, which is a tensor for `isinstance` and for torch's C++.

    Its operations are recorded by `__torch_function__`. It has the form of what it stands for, but nothing may compute
    with its memory: what is not recorded (`vmap`, scripts) comes to `__torch_dispatch__`, and is refused.
    """

    __hash__ = object.__hash__

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_PROXIES or name in object.__getattribute__(self, "__dict__"):
            return object.__getattribute__(self, name)
        return self.__getattr__(name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        reason = f"it computes {func} by means that are not recorded"
        for each in tensors_of((args, kwargs)):
            if isinstance(each, TensorProxy):
                each.tracer.refuse(reason)
        raise TypeError(reason)


_OF_PROXIES = frozenset({*dir(ValueProxy), "__torch_dispatch__"})


def proxy_of(node: fx.Node, tracer: Any, value: Any) -> ValueProxy:
    """Returns a proxy of a value that the recorder `tracer` knows."""
    if not isinstance(value, Tensor):
        return NumberProxy(node, tracer)
    proxy = value.detach().as_subclass(TensorProxy)
    ValueProxy.__init__(proxy, node, tracer)
    return proxy


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
