"""Numbers as text with three significant digits and their unit; fields, which define how a value is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from headrace.spec.plain import to_plain

MISSING = "–"
"""The text of a value that was not measured."""

_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float | None) -> str:
    """Returns a number in at most 6 characters where its size is below 1e15, else in 9: 0.0312, 4.57, 4312, 431k."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 999.5e12:
        return f"{value:.2e}"
    if size >= 99_995:
        factor, letter = next(row for row in _LARGE if size >= row[0] * 0.9995)
        return _digits(value / factor) + letter
    return f"{value:.0f}" if size >= 999.5 else _digits(value)


def fixed(value: float | None, factor: float = 1.0) -> str:
    """Returns `value * factor` with two decimals at most, in at most 5 characters up to 99999."""
    if value is None:
        return MISSING
    scaled = value * factor
    if scaled < 0.005:
        return "0"
    return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}"


def tick(value: float, limit: float) -> str:
    """Returns a number for an axis that ends at `limit`, without zeros that say nothing: 0.5, 2, 40k."""
    if value == 0:
        return "0"
    factor, letter = next((row for row in _LARGE if limit >= row[0] * 10), (1.0, ""))
    return f"{value / factor:.5g}{letter}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.0995 else f"{value:.3g}"


def percent(value: float) -> str:
    """Returns a part of 1 as "4.2 %"."""
    return f"{value * 100:.1f} %" if value < 0.0995 else f"{value * 100:.0f} %"


def byte_count(value: float | None) -> str:
    """Returns bytes with a decimal unit, "1.69 MB"."""
    if value is None:
        return MISSING
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor * 0.9995:
            return f"{_digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Returns a time, "8.3 s", "4 min 05 s", "3 h 12 min"."""
    if seconds < 0.9995:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def clean(text: str) -> str:
    """Returns text without control characters, which neither terminals nor XML may see."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter in "\n\t" or (letter.isprintable() or letter == " ") else "\ufffd" for letter in text
    )


def deviation(predicted: float, measured: float) -> str:
    """Returns by how much a prediction is too high, as "+4.2 %"."""
    part = 100 * (predicted / measured - 1)
    return f"{part:+.1f} %" if abs(part) < 99.95 else f"{part:+.0f} %"


def plural(count: float, noun: str, ending: str = "s") -> str:
    """Returns "1 round", "2 rounds", "2.5 rounds"."""
    shown = f"{count:.4g}" if isinstance(count, float) else str(count)
    return f"{shown} {noun}{ending * (count != 1)}"


S = TypeVar("S")


@dataclass(frozen=True)
class Field(Generic[S]):
    """One value of a subject `S`, and where it is shown.

    Attributes:
        key: the value's name in JSON; a field without a key is not in JSON.
        label: its name in a table of one run; a field without a label has no row there.
        head: its name above a column, in lines; a field without a head has no column.
    """

    get: Callable[[S], Any]
    format: Callable[[Any], str] = str
    key: str = ""
    label: str = ""
    head: str = ""


def to_json(fields: Iterable[Field[S]], subject: S | None) -> dict[str, Any] | None:
    """Returns the fields that have a key as JSON values with all digits; None without a subject."""
    return None if subject is None else {each.key: to_plain(each.get(subject)) for each in fields if each.key}


def to_rows(fields: Iterable[Field[S]], subject: S | None) -> list[tuple[str, str]]:
    """Returns label and text of the fields that have a label; a value of None has no row."""
    values = [] if subject is None else [(each, each.get(subject)) for each in fields if each.label]
    return [(each.label, each.format(value)) for each, value in values if value is not None]


def to_heads(fields: Iterable[Field[S]]) -> list[str]:
    """Returns the names above the columns."""
    return [each.head for each in fields if each.head]


def to_cells(fields: Iterable[Field[S]], subject: S | None) -> list[str]:
    """Returns the text of the fields that have a head; empty cells without a subject."""
    return ["" if subject is None else each.format(each.get(subject)) for each in fields if each.head]


def json_fields(*names: str) -> tuple[Field[Any], ...]:
    """Returns fields for attributes ("outcome.attempts") that are in JSON under the last part of their name."""
    return tuple(Field(attrgetter(name), key=name.rpartition(".")[2]) for name in names)


def json_mapping(fields: Sequence[Field[S]], name: str, key: str) -> Field[Any]:
    """Returns a field for an attribute that maps to subjects, in JSON under `key`."""
    return Field(lambda subject: {to: to_json(fields, each) for to, each in getattr(subject, name).items()}, key=key)


def torn_text(count: int) -> str:
    """Returns what is said of so many event files whose last line is not whole."""
    ends = "file ends" if count == 1 else "files end"
    return f"{count} event {ends} in half a line: what that process did after it is not known"
