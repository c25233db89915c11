"""The disk, a folder of folders of files; and digests of what is written and read."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from headrace.machine import disk

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a FIFO would wait for a writer forever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class File:
    """An open file; a context that closes it. Every method may raise OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def size(self) -> int:
        """Returns the file's length, bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, buffer: memoryview) -> int:
        """Reads the next bytes into `buffer`; returns how many, 0 at the end of the file."""
        return os.readv(self._descriptor, [buffer])

    def map(self) -> mmap.mmap:
        """Returns the file's content as memory, read when it is used; writing to it changes a copy."""
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)

    def write(self, data: memoryview) -> int:
        """Appends a front part of `data`; returns how many bytes."""
        return os.write(self._descriptor, data)

    def write_all(self, data: memoryview) -> None:
        """Appends all of `data`."""
        while data:
            data = data[self.write(data) :]

    def sync(self) -> None:
        """Returns when the file would survive a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Storage:
    """A folder of the operating system, which need not exist; tests put other disks in its place.

    Places in it are relative, "folder/file"; "" is the folder itself. Symbolic links are not followed, in it or to it.
    Every method may raise OSError.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def prepare(self) -> None:
        """Creates the folder itself durably, if it is missing."""
        missing = [folder for folder in (self._root, *self._root.parents) if not disk.exists(folder)]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
        # Existing folders may have been created by a process that did not sync the last of them.
        for parent in {self._root.parent, *(folder.parent for folder in missing)}:
            with _opened(parent, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                os.fsync(descriptor)

    def entries(self, folder: str) -> Iterator[str]:
        """Yields the names in a folder, unordered."""
        with self._folder(folder) as descriptor, os.scandir(descriptor) as listing:
            for entry in listing:
                yield entry.name

    def make_folder(self, folder: str) -> None:
        """Creates a folder that does not exist."""
        with self._parent(folder) as (parent, name):
            os.mkdir(name, dir_fd=parent)

    def create(self, place: str) -> File:
        """Creates a file that does not exist, for writing."""
        with self._parent(place) as (parent, name):
            return File(os.open(name, _NEW, 0o666, dir_fd=parent))

    def open(self, place: str) -> File:
        """Opens a regular file without other hard links, for reading."""
        with self._parent(place) as (parent, name):
            descriptor = os.open(name, _READ, dir_fd=parent)
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
            return File(descriptor)
        os.close(descriptor)
        if stat.S_ISREG(state.st_mode):
            raise OSError(errno.EMLINK, f"it has {state.st_nlink} names (hard links), 1 is allowed", place)
        raise OSError(errno.EINVAL, f"it is no regular file (mode {state.st_mode:#o})", place)

    def rename(self, old: str, new: str) -> None:
        """Renames a folder atomically."""
        with self._folder("") as root:
            os.rename(old, new, src_dir_fd=root, dst_dir_fd=root)

    def sync(self, folder: str) -> None:
        """Returns when the names in a folder would survive a power cut."""
        with self._folder(folder) as descriptor:
            os.fsync(descriptor)

    def delete_file(self, place: str) -> None:
        """Deletes a file or a link."""
        with self._parent(place) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def delete_folder(self, folder: str) -> None:
        """Deletes an empty folder."""
        with self._parent(folder) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    @contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        if not folder:
            with _opened(self._root, _FOLDER) as descriptor:
                yield descriptor
            return
        # Part by part, because O_NOFOLLOW concerns the last part of a path only.
        with self._parent(folder) as (parent, name), _opened(name, _FOLDER, parent) as descriptor:
            yield descriptor

    @contextmanager
    def _parent(self, place: str) -> Iterator[tuple[int, str]]:
        folder, _, name = place.rpartition("/")
        with self._folder(folder) as descriptor:
            yield descriptor, name


@contextmanager
def _opened(path: Path | str, flags: int, parent: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


CHUNK = 4 << 20
"""Bytes that are written or read at once."""

_WORTH_A_THREAD = 1 << 18


class Digest:
    """The SHA-256 of the data fed to it, computed by a thread, at most `behind_bytes` behind; a context."""

    def __init__(self, behind_bytes: int = 0) -> None:
        self._state = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._behind_bytes = behind_bytes
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._waiting_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def feed(self, data: memoryview, behind_bytes: int | None = None) -> None:
        """Adds data that stays unchanged until it is digested; waits for all but the last `behind_bytes` fed before."""
        if len(data) < _WORTH_A_THREAD:
            self._wait(0)
            self._state.update(data)
            return
        self._wait(self._behind_bytes if behind_bytes is None else min(behind_bytes, self._behind_bytes))
        self._waiting.append((len(data), self._thread.submit(self._state.update, data)))
        self._waiting_bytes += len(data)

    def hexdigest(self) -> str:
        """Returns the digest of everything."""
        self._wait(0)
        return self._state.hexdigest()

    def _wait(self, behind_bytes: int) -> None:
        while self._waiting_bytes > behind_bytes:
            count, digested = self._waiting.popleft()
            digested.result()
            self._waiting_bytes -= count
