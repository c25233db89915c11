"""Frozen dataclasses to JSON values and back: what crosses from deciding to doing, and the evidence."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Returns `value` as dicts, lists, strings, numbers, booleans and None only."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def from_plain(kind: type[T], value: Any) -> T:
    """Builds a `kind` (a dataclass, or a type made of them) from what `to_plain` returned; raises TypeError."""
    return typing.cast(T, _build(kind, value))


def _build(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any or kind is object:
        return value
    if origin in (typing.Union, types.UnionType):
        (choice,) = set(arguments) - {type(None)}
        return None if value is None and type(None) in arguments else _build(choice, value)
    if origin is tuple:
        items = _expect(list, value)
        # `tuple[int, ...]` repeats its first argument; others have one for each item.
        kinds = arguments[:1] * len(items) if arguments[1:] == (Ellipsis,) else arguments
        if len(kinds) != len(items):
            raise TypeError(f"expected {len(kinds)} values, got {len(items)}: {value!r}")
        return tuple(_build(each, item) for each, item in zip(kinds, items, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {key: _build(arguments[1], item) for key, item in _expect(dict, value).items()}
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), _expect(dict, value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _expect(kind, value)


def _build_dataclass(kind: type, value: dict[str, Any]) -> Any:
    hints = _field_types(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")
    return kind(**{name: _build(hints[name], item) for name, item in value.items()})


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _expect(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}: {value!r}")
    return value
