"""Frozen dataclasses to JSON values and back: what crosses from deciding to doing, and the evidence."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_INT_BITS = 128
"""No count needs more, nor do the states of random generators; and a float holds each."""


def to_plain(value: Any) -> Any:
    """Returns `value` as dicts, lists, strings, numbers, booleans and None only."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    kind: Any = type(value)
    names = _field_names(kind)
    if names is not None:
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def finite(value: Any) -> Any:
    """Returns JSON values with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def from_plain(kind: type[T], value: Any) -> T:
    """Builds a `kind` (a dataclass, or a type made of them) from what `to_plain` returned; raises TypeError.

    Times (fields named `seconds` or `..._s`) are finite; other floats, such as a loss, need not be.
    """
    return typing.cast(T, _builder(typing.cast(Any, kind))(value))


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


@functools.cache
def _builder(kind: Any, finite: bool = False) -> Callable[[Any], Any]:
    """Returns what builds a `kind`, of which floats are `finite` or need not be.

    A run has many thousand events, so that annotations are looked at once.
    """
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any or kind is object:
        return lambda value: value
    if origin in (typing.Union, types.UnionType):
        (choice,) = set(arguments) - {type(None)}
        build = _builder(choice, finite)
        return _optional(build) if type(None) in arguments else build
    if origin is tuple:
        return functools.partial(_build_tuple, arguments, finite)
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_build_mapping, _builder(arguments[1], finite))
    if dataclasses.is_dataclass(kind):
        return functools.partial(_build_dataclass, typing.cast(type, kind))
    if kind is float:
        return _build_finite if finite else _build_float
    return _build_int if kind is int else functools.partial(_expect, kind)


def _optional(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else build(value)


def _build_tuple(arguments: tuple[Any, ...], finite: bool, value: Any) -> tuple[Any, ...]:
    items = _expect(list, value)
    # `tuple[int, ...]` repeats its first argument; others have one for each item.
    kinds = arguments[:1] * len(items) if arguments[1:] == (Ellipsis,) else arguments
    if len(kinds) != len(items):
        raise TypeError(f"expected {len(kinds)} values, got {len(items)}: {value!r}")
    return tuple(_builder(each, finite)(item) for each, item in zip(kinds, items, strict=True))


def _build_mapping(build: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    return {key: build(item) for key, item in _expect(dict, value).items()}


def _build_dataclass(kind: type, value: Any) -> Any:
    given = _expect(dict, value)
    builders = _field_builders(kind)
    unknown = sorted(given.keys() - builders.keys())
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")
    return kind(**{name: builders[name](item) for name, item in given.items()})


@functools.cache
def _field_builders(kind: type) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: _builder(hints[name], name == "seconds" or name.endswith("_s")) for name in names}


def _build_int(value: Any, kind: type = int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unexpected(kind, value)
    if value.bit_length() > _INT_BITS:
        raise TypeError(f"expected an int of at most {_INT_BITS} bits, got one of {value.bit_length()}")
    return value


def _build_float(value: Any) -> float:
    return value if isinstance(value, float) else float(_build_int(value, float))


def _build_finite(value: Any) -> float:
    built = _build_float(value)
    if not math.isfinite(built):
        raise TypeError(f"expected a finite number, got {built!r}")
    return built


def _expect(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _unexpected(kind, value)
    return value


def _unexpected(kind: type, value: Any) -> TypeError:
    return TypeError(f"expected {kind.__name__}, got {type(value).__name__}: {value!r:.200}")
