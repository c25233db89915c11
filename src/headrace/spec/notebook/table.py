"""A frozen value as a short table, which a notebook shows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from html import escape
from typing import Any

_MOST, _MOST_TEXT = 4, 160
_CELL = 'style="text-align: left; padding: 2px 14px 2px 0"'


def shown_as_table(value: Any) -> str:
    """Returns a dataclass as an HTML table: the fields that are not as they are by default, each in a few words."""
    rows = "".join(
        f'<tr><th scope="row" {_CELL}>{escape(name)}</th><td {_CELL}>{escape(in_few_words(each))}</td></tr>'
        for name, each in _given(value).items()
    )
    return f"<table><caption {_CELL}>{escape(type(value).__name__)}</caption><tbody>{rows}</tbody></table>"


def in_few_words(value: Any) -> str:
    """Returns a value as text: of functions their names, of arrays shape and type, of what is long its beginning."""
    if isinstance(value, functools.partial):
        given = [
            *map(in_few_words, value.args),
            *(f"{key}={in_few_words(each)}" for key, each in value.keywords.items()),
        ]
        return f"{in_few_words(value.func)}({', '.join(given)})"
    if shape := getattr(value, "shape", None):
        return f"{tuple(shape)} {getattr(value, 'dtype', '')}"
    if isinstance(value, Mapping):
        return _some([f"{key}={in_few_words(each)}" for key, each in value.items()])
    if isinstance(value, list | tuple):
        return _some(list(map(in_few_words, value)))
    if is_dataclass(value) and not isinstance(value, type):
        given = [f"{key}={in_few_words(each)}" for key, each in _given(value).items()]
        return f"{type(value).__name__}({', '.join(given)})"
    name = getattr(value, "__qualname__", None)
    if callable(value) and name is None:
        name = type(value).__name__
    text = name.replace("<locals>.", "") if callable(value) and name else str(value)
    return f"{' '.join(text.split()):.{_MOST_TEXT}}"


def _some(texts: list[str]) -> str:
    rest = len(texts) - _MOST
    return ", ".join(texts[:_MOST]) + (f" and {rest} more" if rest > 0 else "")


def _given(value: Any) -> dict[str, Any]:
    """Returns the fields that differ from their defaults."""
    found = {}
    for each in fields(value):
        own = getattr(value, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if own is default or (isinstance(own, str | int | float | tuple) and own == default):
            continue
        if is_dataclass(own) and not isinstance(own, type) and own == default:
            continue
        found[each.name] = own
    return found
