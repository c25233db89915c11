"""Writes manifests as YAML, of mappings, lists and values as JSON has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?<!-)")
"""Texts that need no quotes, unless they mean something else."""
_OTHERS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def yaml_of(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns documents with a line of three hyphens between them."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _after(f"{_scalar(key)}:", item)
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _after(key: str, item: Any) -> Iterator[str]:
    if isinstance(item, Mapping | list) and item:
        yield key
        yield from (f"  {line}" for line in _lines(item))
    else:
        yield f"{key} {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OTHERS:
        return value
    # YAML reads JSON.
    return json.dumps(value)
