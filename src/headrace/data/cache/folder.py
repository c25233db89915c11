"""The owner of a cache folder: a manifest says what it holds, and its users share a lock."""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from pathlib import Path

from headrace.data.cache.shards import ENTRIES, RECORDS, repair
from headrace.errors import UnfitMachine, UsageError

FORMAT = 1
"""The version of records, entries and manifest; a folder of another version is made anew."""
_MANIFEST, _LOCK, _PART = "manifest.json", "lock", ".part"
_PATIENCE_S = 10.0
_PAUSE_S = 0.02


class CacheFolderLock:
    """This process's lock of a cache folder, held until the object or the process ends.

    A lock of fcntl is not inherited by a fork. It is lost when the process closes the file by any descriptor, so that a
    process may lock a folder only once.
    """

    def __init__(self, folder: Path) -> None:
        self.process = os.getpid()
        self._descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._descriptor)

    def lock(self, exclusive: bool) -> bool:
        """Tries to take the lock, exclusive or shared; returns whether it did."""
        try:
            fcntl.lockf(self._descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both
            return False
        return True


_CLAIMS: weakref.WeakValueDictionary[Path, CacheFolderLock] = weakref.WeakValueDictionary()


def claim(
    folder: Path, key: str, about: str, patience_s: float = _PATIENCE_S
) -> tuple[CacheFolderLock, tuple[str, ...]]:
    """Locks a folder as the cache of a pipeline, made if needed; returns the lock and lines for the user.

    `key` identifies source and steps, `about` describes them. A cache of this process for another pipeline in that
    folder is made anew; one of another process is a UsageError after `patience_s`. For one thread at a time.
    """
    deadline = time.monotonic() + patience_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = _CLAIMS.get(folder)
        if held is None or held.process != os.getpid():
            held = _CLAIMS[folder] = CacheFolderLock(folder)
        notices: tuple[str, ...] = ()
        while True:
            if held.lock(exclusive=True):
                notices += _make(folder, key, about)
            # The manifest is written under the exclusive lock only.
            if held.lock(exclusive=False) and _differs(folder, key) is None:
                return held, notices
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
    except OSError as error:
        raise UnfitMachine(f"{folder} cannot be a cache: {error.strerror or error}; give another folder") from error
    raise UsageError(
        f"another process uses the cache in {folder}, and {_differs(folder, key)}; this is {about}: "
        "give each pipeline a folder of its own"
    )


def _make(folder: Path, key: str, about: str) -> tuple[str, ...]:
    difference = _differs(folder, key)
    if difference is None:
        repair(folder)
        return ()
    old = [path for path in folder.iterdir() if path.suffix in (RECORDS, ENTRIES, _PART)]
    # The manifest first: without it, no process uses the rest.
    (folder / _MANIFEST).unlink(missing_ok=True)
    for path in old:
        path.unlink()
    part = folder / f"{_MANIFEST}{_PART}"
    part.write_text(json.dumps({"format": FORMAT, "key": key, "about": about}) + "\n", encoding="utf-8")
    os.replace(part, folder / _MANIFEST)
    return (f"the cache in {folder} is made anew, because {difference}",) if old else ()


def _differs(folder: Path, key: str) -> str | None:
    """Returns why a folder is not the cache with that key; None if it is."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError):
        return "it has no manifest that can be read"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        version = manifest.get("format") if isinstance(manifest, dict) else None
        return f"it is of version {version!r}, and this is {FORMAT}"
    if manifest.get("key") != key:
        return f"it is of other data or other code ({manifest.get('about')})"
    return None
