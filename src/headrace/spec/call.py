"""A name with options, as people write it: `downpour(push_every=2)`, `hybrid(mirrored(2), pipeline(2))`."""

from __future__ import annotations

import ast
from typing import NamedTuple

from headrace.errors import UsageError


class Call(NamedTuple):
    """A name, its positional values and its options. All are plain values, or calls."""

    name: str
    values: tuple[object, ...] = ()
    options: dict[str, object] = {}  # noqa: RUF012  (never changed)


def parse_call(text: str) -> Call:
    """Returns the parsed text.

    Raises:
        UsageError: it is not a name with options.
    """
    name = text.partition("(")[0]
    if name == text:
        return Call(text.strip())
    try:
        if ":" in name:
            # A place, "mine.py:SlowMo", is no name of Python's.
            return parse_call(f"place{text[len(name) :]}")._replace(name=name.strip())
        return _call(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        # The parser's own message does not name the remedy.
        remedy = f"write it as {name.strip() or 'name'}(option=value, other='text')"
        place = ", and a place within it as 'file.py:Name(...)'" * (".py:" in text[len(name) :])
        raise UsageError(f"{text!r} is not a name with options: {remedy}{place}") from None


def _call(node: ast.expr) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("not a name with options")
    options = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
    if len(options) < len(node.keywords):
        raise ValueError("an option has no name")
    return Call(node.func.id, tuple(map(_value, node.args)), options)


def _value(node: ast.expr) -> object:
    return _call(node) if isinstance(node, ast.Name | ast.Call) else ast.literal_eval(node)


def split_calls(text: str) -> list[str]:
    """Returns the parts between commas, except commas inside parentheses and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
        elif character in "()[]":
            depth += 1 if character in "([" else -1
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
