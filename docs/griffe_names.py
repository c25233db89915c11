"""What griffe, which reads docstrings for the site, has to be told: `a, b: text` in Attributes or Args is about two."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?:(?<=^Attributes:\n)|(?<=^Args:\n))(?: {4}.*\n?|\n(?= {4}))+", re.MULTILINE)
_SEVERAL = re.compile(r"^ {4}(\w+(?:,\s+\w+)+):(.*\n?(?: {5,}.*\n?)*)", re.MULTILINE)


class NamesApart(griffe.Extension):
    """Gives each of several names an entry of its own, with the same text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub(lambda section: _SEVERAL.sub(_apart, section[0]), obj.docstring.value)


def _apart(entry: re.Match[str]) -> str:
    text = entry[2].rstrip("\n") + "\n"
    return "".join(f"    {name}:{text}" for name in re.split(r",\s+", entry[1]))
