"""Values to JSON values and back: what crosses from deciding to doing, and the evidence."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

FiniteFloat = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Neither NaN nor infinite: a time, which reports add up."""
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_INT_BITS = 128
"""No count needs more, nor do the states of random generators; and a float holds each."""


def to_plain(value: Any) -> Any:
    """Returns `value` as dicts, lists, tuples, strings, numbers, booleans and None only; raises TypeError."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=to_builtin)


def to_builtin(value: Any) -> Any:
    """Returns what is written for a value of a class that msgspec does not know; raises TypeError."""
    if isinstance(value, Mapping):
        return dict(value)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
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
    try:
        built = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise TypeError(str(error)) from error
    _check(value, to_plain(built), "$", False)
    return built


def _check(given: Any, built: Any, path: str, is_time: bool) -> None:
    """Raises TypeError for what msgspec lets pass in dataclasses: unknown fields, huge ints, times without an end."""
    if isinstance(given, dict):
        for name, item in given.items():
            if name not in built:
                raise TypeError(f"unknown field `{name}` - at `{path}`")
            _check(item, built[name], f"{path}.{name}", is_time or name == "seconds" or name.endswith("_s"))
    elif isinstance(given, list | tuple):
        for index, (item, other) in enumerate(zip(given, built, strict=True)):
            _check(item, other, f"{path}[{index}]", is_time)
    elif isinstance(given, int) and given.bit_length() > _INT_BITS:
        raise TypeError(f"expected an int of at most {_INT_BITS} bits, got one of {given.bit_length()} - at `{path}`")
    elif is_time and isinstance(given, float) and not math.isfinite(given):
        raise TypeError(f"expected a finite number, got {given!r} - at `{path}`")
