"""A name with options, as people write it: `downpour(push_every=2)`."""

from __future__ import annotations

import ast

from headrace.errors import UsageError

__all__ = ["parse_call", "split_calls"]


def parse_call(text: str) -> tuple[str, dict[str, object]]:
    """Returns the name, and its options as plain values.

    Raises:
        UsageError: it has another form.
    """
    name = text.partition("(")[0]
    if name == text:
        return text.strip(), {}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("options have names")
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        if len(options) < len(call.keywords):
            raise ValueError("an option has no name")
    except (SyntaxError, ValueError):
        # Where Python's parser stumbled says less than what is right.
        raise UsageError(
            f"{text!r} is not a name with options: write it as {name.strip() or 'name'}(option=value, other='text')"
        ) from None
    return call.func.id, options


def split_calls(text: str) -> list[str]:
    """Returns what stands between commas, those inside parentheses and quotes aside."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
        elif character in "()":
            depth += 1 if character == "(" else -1
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
