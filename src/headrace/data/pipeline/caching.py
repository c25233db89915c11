"""Whether a cache can stand where it is asked for, and by what it is known again."""

from __future__ import annotations

import os
from collections.abc import Sequence

from headrace.data.cache.fingerprint import fingerprint
from headrace.data.pipeline.source import Source
from headrace.data.pipeline.steps import Cache, Filter, Map, Step
from headrace.errors import UsageError

_MEMORY = "memory"
_MEMORY_LIMIT = 1 << 30


def cached(
    source: Source, steps: Sequence[Step], where: str | os.PathLike[str], limit: int | None, key: str | None
) -> Cache:
    """Returns the cache behind the steps of a source; see `Pipeline.cache`."""
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise UsageError(f"limit must be a whole number of bytes of at least 1, got {limit!r}")
    for step in steps:
        if isinstance(step, Cache):
            raise UsageError(f"{step.name} stands before this cache already; one is enough: keep the later")
        if step.draws:
            raise UsageError(
                f"{step.name} draws random numbers, and a cache behind it would keep the first that it drew for every "
                "epoch; put .cache(...) before it"
            )
    if not source.lasting:
        raise UsageError(
            "the examples of a mixed or interleaved pipeline differ from epoch to epoch; cache its parts: "
            "mix(first.cache(...), second.cache(...))"
        )
    if where == _MEMORY:
        return Cache(None, _MEMORY_LIMIT if limit is None else limit)
    folder = os.path.abspath(os.path.expanduser(os.fspath(where)))
    about = ", ".join((f"{len(source):,} examples", *(step.name for step in steps)))
    return Cache(folder, limit, _key(source, steps) if key is None else fingerprint(key, len(source)), about)


def _key(source: Source, steps: Sequence[Step]) -> str:
    identity = source.identity
    if not identity:
        raise UsageError(
            f"a {type(source).__name__} cannot tell whether a folder still holds what was made of it; "
            'give .cache(folder, key="..."), and another key whenever the data or the transforms change'
        )
    done = [
        (type(step).__name__, step.function, *((step.field, step.batched) if isinstance(step, Map) else ()))
        for step in steps
        if isinstance(step, Map | Filter)
    ]
    return fingerprint(len(source), identity, done)
