"""The definitions of a pipeline's steps, and of how its examples are read and batched."""

from __future__ import annotations

import enum
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace.data.pipeline.collator import Collator
from headrace.data.pipeline.source import Source, require_whole
from headrace.errors import UsageError

_PARALLEL = ("auto", "inline", "threads", "processes")


@runtime_checkable
class Into(Protocol):
    """A transform that writes its result, of `shape` and `dtype`, into the batch's own memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __call__(self, example: Any) -> Any:
        """Returns the result."""

    def into(self, example: Any, out: NDArray[Any]) -> None:
        """Writes the result to `out`; other threads run meanwhile."""


@dataclass(frozen=True)
class Map:
    """A function that every example goes through, or a list of examples if `batched`; steps have names for messages.

    `draws` says whether it has a parameter `rng` for a `numpy.random.Generator`, or a list of them. It maps one `field`
    of the example, by number or name, or the whole if None.
    """

    function: Callable[..., Any]
    draws: bool = False
    field: int | str | None = None
    batched: bool = False

    @property
    def name(self) -> str:
        return f"map({_name(self.function)})"

    def given(self, example: Any) -> Any:
        """Returns what the function gets of an example."""
        return example if self.field is None else example[self.field]

    def put(self, example: Any, value: Any) -> Any:
        """Returns the example with a value in the place of what the function got."""
        if self.field is None:
            return value
        if isinstance(example, dict):
            return {**example, self.field: value}
        position = range(len(example))[self.field]  # type: ignore[index]
        return type(example)((*example[:position], value, *example[position + 1 :]))


@dataclass(frozen=True)
class Filter:
    """A predicate: examples for which it returns something false are left out; `draws` as of `Map`."""

    function: Callable[..., Any]
    draws: bool = False

    @property
    def name(self) -> str:
        return f"filter({_name(self.function)})"


@dataclass(frozen=True, eq=False)
class Cache:
    """A cache of the examples at this place of the pipeline, in a `folder` or (None) in the memory of each process.

    `limit` is in bytes. `key` identifies the source and the steps before, `about` describes them; a folder with another
    key is made anew.
    """

    folder: str | None
    limit: int | None
    key: str = ""
    about: str = ""
    draws: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"cache({self.folder or 'memory'})"


class Absent(enum.Enum):
    """Why a cache does not hand out an example."""

    MISSING = enum.auto()
    """The cache does not have it."""
    LEFT_OUT = enum.auto()
    """The cache knows that a filter leaves it out."""


Step = Map | Filter | Cache


def writer(steps: Sequence[Step]) -> Map | None:
    """Returns the last step if it writes its results into the batch's own memory."""
    last = steps[-1] if steps else None
    return last if isinstance(last, Map) and isinstance(last.function, Into) else None


@dataclass(frozen=True)
class Batching:
    """How examples become a batch: the arguments of `InputPipeline.batch`."""

    size: int | None = None
    pad: float | None = None
    pad_to: int | None = None
    lengths: NDArray[np.int64] | None = None
    window: int = 64
    collate: Collator | None = None
    drop_last: bool = False


@dataclass(frozen=True)
class Reading:
    """How a worker reads: the arguments of `InputPipeline.map`, `prefetch` and `on_error`.

    `count` is of threads or processes, `ahead` of batches, both None to measure; `memory_limit` is in bytes.
    """

    parallel: str = "auto"
    count: int | None = None
    ahead: int | None = None
    memory_limit: int = 1 << 30
    on_error: str = "raise"
    most_skipped: int = 100

    def __post_init__(self) -> None:
        if self.parallel not in _PARALLEL:
            raise UsageError(f"parallel must be one of {', '.join(_PARALLEL)}, got {self.parallel!r}")
        if self.on_error not in ("raise", "skip"):
            raise UsageError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")
        for name, least in (("count", 1), ("ahead", 0), ("memory_limit", 1), ("most_skipped", 0)):
            value = getattr(self, name)
            if value is not None:
                require_whole(f"{name} must be", value, least)


def takes_rng(function: Callable[..., Any]) -> bool:
    """Returns whether a function has a parameter `rng`; a UsageError if it is no function."""
    if not callable(function):
        raise UsageError(f"map and filter take a function of an example, got {function!r:.60}")
    try:
        return "rng" in inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return False


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


def cached(
    source: Source, steps: Sequence[Step], where: str | os.PathLike[str], limit: int | None, key: str | None
) -> Cache:
    """Returns the cache after the steps of a source; see `InputPipeline.cache`."""
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
    if where == "memory":
        return Cache(None, 1 << 30 if limit is None else limit)
    folder = os.path.abspath(os.path.expanduser(os.fspath(where)))
    about = ", ".join((f"{len(source):,} examples", *(step.name for step in steps)))
    return Cache(folder, limit, _key(source, steps, key), about)


def _key(source: Source, steps: Sequence[Step], key: str | None) -> str:
    # Imported for those alone that keep a cache in files.
    from headrace.data.cache.fingerprint import fingerprint

    if key is not None:
        return fingerprint(key, len(source))
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
