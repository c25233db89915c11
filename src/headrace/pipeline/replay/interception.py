"""Calls of modules, hooks and all, that go through a function instead; on the instances alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

_ENTRY = "_compiled_call_impl"
"""What `nn.Module.__call__` calls, where a module has it, instead of hooks and forward."""


class Intercept(Protocol):
    """Stands for the calls of a module; `original` is the call itself."""

    def __call__(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


@contextmanager
def intercepted(modules: Mapping[str, nn.Module], intercept: Intercept) -> Iterator[None]:
    """Lets the calls of modules, by path, go through `intercept`."""
    before = {path: module.__dict__.get(_ENTRY) for path, module in modules.items()}
    try:
        for path, module in modules.items():
            module.__dict__[_ENTRY] = _entry(path, before[path] or module._call_impl, intercept)
        yield
    finally:
        for path, module in modules.items():
            module.__dict__.pop(_ENTRY, None)
            if before[path] is not None:
                module.__dict__[_ENTRY] = before[path]


def _entry(path: str, original: Callable[..., Any], intercept: Intercept) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return intercept(path, original, args, kwargs)

    return call
