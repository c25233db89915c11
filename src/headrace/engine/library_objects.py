"""Objects whose pickles leave out what a worker needs: functions that hang on a model or are memoized, and tables.

A library's function that was made inside another one, such as a hook, goes by value. With it must not go what it names
in its module: a worker's module has its own, which the library's other functions there use.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

import cloudpickle
from torch import nn

from headrace import internals
from headrace.training.user_code.untouched import LIBRARIES

_MEMOIZED = type(functools.cache(len))
_PROTOCOL = 5
"""Of what an object says of itself; any from 2 on is alike."""


def reduced(value: Any) -> tuple[Any, ...] | None:
    """Returns what `__reduce__` would, for such an object; None for any other."""
    if type(value) is FunctionType:
        return _reduced_function(value)
    if type(value) is _MEMOIZED and _goes_by_value(value):
        # It would go by its name. What it calls comes as state, because that may refer to it.
        return _memoized, tuple(value.cache_parameters().values()), value.__wrapped__, None, None, _set_called
    library = sys.modules.get("transformers.modeling_utils")
    if library is not None and isinstance(value, nn.Module) and isinstance(value, library.PreTrainedModel):
        made: Any = value.__reduce_ex__(_PROTOCOL)
        return *made[:3], None, None, _set_model
    return None


def _set_model(model: Any, state: Any) -> None:
    model.__setstate__(state)
    internals.register_outputs(model)


def _reduced_function(function: FunctionType) -> tuple[Any, ...] | None:
    module = sys.modules.get(function.__module__)
    inside = module is not None and "<locals>" in function.__qualname__ and vars(module) is function.__globals__
    if not inside or function.__module__.partition(".")[0] not in LIBRARIES:
        return None
    names = function.__name__, function.__qualname__
    cells = len(function.__closure__ or ())
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    state = (names, function.__defaults__, function.__kwdefaults__, vars(function), held)
    return _function, (function.__module__, function.__code__, cells), state, None, None, _set_function


def _function(module: str, code: CodeType, cells: int) -> FunctionType:
    enclosed = tuple(CellType() for _ in range(cells))
    return FunctionType(code, vars(importlib.import_module(module)), closure=enclosed)


def _set_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    # Later than the function, which its cells may refer to.
    (function.__name__, function.__qualname__), function.__defaults__, function.__kwdefaults__, own, held = state
    vars(function).update(own)
    for cell, content in zip(function.__closure__ or (), held, strict=True):
        cell.cell_contents = content


class _Called:
    """What a memoized function calls, once it has come."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)


def _memoized(maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(_Called())


def _set_called(memoized: Any, function: Callable[..., Any]) -> None:
    memoized.__wrapped__.function = function
    functools.update_wrapper(memoized, function)


def _goes_by_value(function: Any) -> bool:
    """Returns whether the worker has no module with the function."""
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    return function.__module__ in by_value or "<locals>" in function.__qualname__
