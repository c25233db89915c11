"""The caches that this process has open, each once however many read from it."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from headrace.data.cache.files import FileShards
from headrace.data.cache.folder import claim
from headrace.data.cache.shards import MemoryShards
from headrace.data.cache.store import Store
from headrace.data.pipeline.steps import Cache


@dataclass(frozen=True)
class _Open:
    process: int
    store: Store


_OPEN: weakref.WeakKeyDictionary[Cache, _Open] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
# A child must not wait for a thread that is not in it.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def store_of(cache: Cache, examples: int) -> Store:
    """Returns what this process has of a cache, for as long as its definition lives.

    Args:
        cache: the definition.
        examples: of the source.

    Raises:
        UsageError: another pipeline is using the folder.
        UnfitMachine: the disk does not do it.
    """
    found = _OPEN.get(cache)
    # A forked child appends to files of its own.
    if found is None or found.process != os.getpid():
        with _LOCK:
            found = _OPEN.get(cache)
            if found is None or found.process != os.getpid():
                found = _OPEN[cache] = _opened(cache, examples)
    return found.store


def _opened(cache: Cache, examples: int) -> _Open:
    if cache.folder is None:
        limit = cache.limit or 0
        return _Open(os.getpid(), Store(MemoryShards(limit), examples, limit, "the cache in memory"))
    folder = Path(cache.folder)
    held, notices = claim(folder, cache.key, cache.about)
    for other in [other for other in _OPEN if other.folder == cache.folder and other.key != cache.key]:
        # Its files are gone.
        del _OPEN[other]
    store = Store(FileShards(folder, claim=held), examples, cache.limit, f"the cache in {folder}")
    store.tell(notices)
    return _Open(os.getpid(), store)
