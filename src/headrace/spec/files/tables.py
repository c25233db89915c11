"""What is read from files that a person writes: tables of a TOML document, whose errors name the key."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import UnknownName, UsageError

_LARGEST = sys.float_info.max


def read_toml(path: Path | str, what: str) -> dict[str, Any]:
    """Returns a file's content; raises UsageError if it cannot be read as `what`."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # tomllib raises ValueError for whole numbers of too many digits, and RecursionError for too many brackets.
        raise UsageError(f"{path} cannot be read as {what}: {error}") from None


def read_json(path: Path | str, what: str) -> dict[str, Any]:
    """Returns a file's content; raises UsageError if it cannot be read as `what`."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as {what}: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path} cannot be read as {what}: it holds no JSON object")
    return document


def check_keys(item: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Raises UnknownName for a key that a table must not have."""
    for key in item:
        if key not in keys:
            raise UnknownName("key", key, keys, where)


def tables(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns an array of tables, [[key]]; none where it is not given."""
    items = document.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UsageError(f"{key} must be tables, [[{key}]]")
    return items


def text(item: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    """Returns a text; one without a default must be given, and not be empty."""
    value = item.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise _wrong(item, key, where, "a text")
    return value


def flag(item: Mapping[str, Any], key: str, where: str) -> bool:
    """Returns whether a key is true; one that is not given is false."""
    value = item.get(key, False)
    if not isinstance(value, bool):
        raise _wrong(item, key, where, "true or false")
    return value


def number(
    item: Mapping[str, Any],
    key: str,
    where: str,
    default: float | None = None,
    *,
    least: float = 0.0,
    most: float = math.inf,
) -> float:
    """Returns 0, or a number from `least` to `most`; the key says its unit. One without a default must be given.

    `most` is far above anything known, and `least` far below: a number beyond them is in another unit.
    """
    value = item.get(key, default)
    name = f"{where}.{key}".lstrip(".")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A whole number may be larger than any float.
    if not is_number or not 0 <= value <= _LARGEST:
        raise _wrong(item, key, where, "a number of at least 0")
    if value > most:
        raise UsageError(f"{name} is {value:g}, and no machine has more than {most:g}; is it in another unit?")
    if 0 < value < least:
        raise UsageError(f"{name} is {value:g}, and no machine has less than {least:g}; is it in another unit?")
    return float(value)


def whole(
    item: Mapping[str, Any], key: str, where: str, default: int | None = None, *, least: int = 1, most: int = 10**15
) -> int:
    """Returns a whole number from `least` to `most`. One without a default must be given."""
    value = item.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(item, key, where, f"a whole number of at least {least}")
    if value > most:
        raise _wrong(item, key, where, f"a whole number of at most {most:,}")
    return value


def _wrong(item: Mapping[str, Any], key: str, where: str, what: str) -> UsageError:
    """Returns the error of a value that is missing, or is not what it must be."""
    name = f"{where}.{key}".lstrip(".")
    if key not in item:
        return UsageError(f"{name} is missing; it must be {what}")
    return UsageError(f"{name} must be {what}, got {item[key]!r}")
