"""Calls of modules, hooks and all, that go through a function instead; on the instances alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from headrace import internals


class Intercept(Protocol):
    """Stands for the calls of a module; `original` is the call itself."""

    def __call__(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


@contextmanager
def intercepted(modules: Mapping[str, nn.Module], intercept: Intercept) -> Iterator[None]:
    """Lets the calls of modules, by path, go through `intercept`."""
    before = {path: module.__dict__.get(internals.COMPILED_CALL) for path, module in modules.items()}
    try:
        for path, module in modules.items():
            module.__dict__[internals.COMPILED_CALL] = _entry(
                path, before[path] or internals.call_of(module), intercept
            )
        yield
    finally:
        for path, module in modules.items():
            module.__dict__.pop(internals.COMPILED_CALL, None)
            if before[path] is not None:
                module.__dict__[internals.COMPILED_CALL] = before[path]


def _entry(path: str, original: Callable[..., Any], intercept: Intercept) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return intercept(path, original, args, kwargs)

    return call
