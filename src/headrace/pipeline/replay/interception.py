"""Calls of modules, hooks and all, that go through a function instead; on the instances alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from headrace import internals

Intercept = Callable[[str, Callable[..., Any], Any, Any], Any]
"""Stands for the calls of a module: gets its path, the call itself, and the arguments."""


@contextmanager
def intercepted(modules: Mapping[str, nn.Module], intercept: Intercept) -> Iterator[None]:
    """Lets the calls of modules, by path, go through `intercept`."""
    before = {path: module.__dict__.get(internals.COMPILED_CALL) for path, module in modules.items()}
    try:
        for path, module in modules.items():
            original = before[path] or internals.call_of(module)
            module.__dict__[internals.COMPILED_CALL] = partial(_call, intercept, path, original)
        yield
    finally:
        for path, module in modules.items():
            module.__dict__.pop(internals.COMPILED_CALL, None)
            if before[path] is not None:
                module.__dict__[internals.COMPILED_CALL] = before[path]


def _call(intercept: Intercept, path: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return intercept(path, original, args, kwargs)
