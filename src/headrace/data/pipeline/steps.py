"""What is done to every example of a pipeline, in turn: definitions."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace.data.cache.fingerprint import fingerprint
from headrace.data.pipeline.source import Source
from headrace.errors import UsageError

_PARALLEL = ("auto", "inline", "threads", "processes")


@runtime_checkable
class Into(Protocol):
    """A transform that writes its result into the batch's own memory.

    Attributes:
        shape: of each result.
        dtype: of each result.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __call__(self, example: Any) -> Any:
        """Returns the result, `shape`."""

    def into(self, example: Any, out: NDArray[Any]) -> None:
        """Writes the result to `out`, `shape`; lets other threads run meanwhile."""


@dataclass(frozen=True)
class Map:
    """A function that every example goes through.

    Attributes:
        function: takes an example and returns one; or takes a list of them and returns one of as many.
        draws: whether it has a parameter `rng` for a `numpy.random.Generator`; with lists, a list of those.
        field: of the example that it takes and replaces, by number or name; None for the whole.
        batched: whether it takes lists.
    """

    function: Callable[..., Any]
    draws: bool = False
    field: int | str | None = None
    batched: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"map({_name(self.function)})"


@dataclass(frozen=True)
class Filter:
    """A question that decides whether an example is trained on.

    Attributes:
        function: takes an example and returns whether to keep it.
        draws: as of `Map`.
    """

    function: Callable[..., Any]
    draws: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"filter({_name(self.function)})"


@dataclass(frozen=True, eq=False)
class Cache:
    """Where the examples are kept that have come so far.

    Attributes:
        folder: on disk; None for the memory of each process.
        limit: bytes; None for what the disk has.
        key: of the source and the steps before; another one makes the folder anew.
        about: the same in words.
    """

    folder: str | None
    limit: int | None
    key: str = ""
    about: str = ""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"cache({self.folder or 'memory'})"


Step = Map | Filter | Cache


@dataclass(frozen=True)
class Batching:
    """How examples become a batch.

    Attributes:
        size: of a batch where nobody else decides; None for what the job says.
        pad: what the first dim of examples of different lengths is filled up with; None refuses them.
        pad_to: the length that they are filled up to; None for the longest of the batch.
        lengths: of all examples, `(examples,)`; those of about one length come into one batch. None for no such order.
        window: batches within which examples are sorted by length.
    """

    size: int | None = None
    pad: float | None = None
    pad_to: int | None = None
    lengths: NDArray[np.int64] | None = None
    window: int = 64


@dataclass(frozen=True)
class Reading:
    """How a worker reads.

    Attributes:
        parallel: "inline", "threads" or "processes"; "auto" measures and chooses.
        count: of threads or processes; None measures.
        ahead: batches that are read before they are asked for; None for what fits.
        memory_limit: bytes that all batches that are being read or wait may take.
        on_error: "raise", or "skip" to leave out examples that cannot be had.
        most_skipped: so many may be left out in an epoch, by each worker.
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
        limits: Mapping[str, tuple[int | None, int]] = {
            "count": (self.count, 1),
            "ahead": (self.ahead, 0),
            "memory_limit": (self.memory_limit, 1),
            "most_skipped": (self.most_skipped, 0),
        }
        for name, (value, least) in limits.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")


def takes_rng(function: Callable[..., Any]) -> bool:
    """Returns whether a function has a parameter `rng`."""
    try:
        return "rng" in inspect.signature(function).parameters
    except ValueError:  # some built-in functions do not tell their parameters
        return False


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


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
