"""Files on this machine and on any file system that fsspec knows, and sources of examples that lie in them."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from headrace.data.pipeline.source import Source
from headrace.errors import DataError, HeadraceError, UnfitMachine, UsageError
from headrace.machine.extras import import_package, remedy

T = TypeVar("T")


class Spans:
    """Consecutive pieces of given lengths; `begins` has the first example of each and, last, the total."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.begins = tuple(accumulate(lengths, initial=0))

    def find(self, index: int) -> tuple[int, int]:
        """Returns the piece that has an example, and the example's number there."""
        # The last piece that begins there has it, since those before it are empty.
        which = bisect_right(self.begins, index) - 1
        return which, index - self.begins[which]


class BoundedCache(Generic[T]):
    """An LRU cache for threads, bounded by the sum of `size(value)`, or else by the number of values.

    One value alone may exceed the bound. A pickled copy begins empty; a fork keeps the values.
    """

    def __init__(self, most: int, size: Callable[[T], int] | None = None) -> None:
        self._most = most
        self._size = size
        self._begin()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the value of a key. If it is missing, one thread makes it; others that want it wait."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    return self._values[key]
            value = make()
            with self._lock:
                # Another thread has made it, too, where it was evicted while this one waited.
                if key in self._values:
                    return self._values[key]
                self._values[key] = value
                self._bytes += self._size(value) if self._size else 1
                while self._bytes > self._most and len(self._values) > 1:
                    _, oldest = self._values.popitem(last=False)
                    self._bytes -= self._size(oldest) if self._size else 1
                self._making.pop(key, None)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {"_most": self._most, "_size": self._size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._bytes = 0
        self.reset_locks()
        _ALL.add(self)

    def reset_locks(self) -> None:
        """Makes new locks: in a fork, the old ones may be held by threads that it does not have."""
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()


_ALL: weakref.WeakSet[BoundedCache[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_ALL):
        cache.reset_locks()


os.register_at_fork(after_in_child=_after_fork)


OPEN = 64
"""Files that a process keeps open."""
_LISTED_AT_ONCE = 16
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


class _Descriptor:
    """An open file of this machine; closed when the last reader lets go of it."""

    def __init__(self, file: SourceFile) -> None:
        self.number = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)
        file.require(os.fstat(self.number).st_size)


_DESCRIPTORS: BoundedCache[_Descriptor] = BoundedCache(OPEN)
"""Files are read at an offset, so that threads and forks may share what is open."""


def _read_local(file: SourceFile, start: int, count: int | None) -> bytes:
    if count is None:
        # A file that is read whole will hardly be read again soon.
        descriptor = _Descriptor(file)
    else:
        descriptor = _DESCRIPTORS.get((file.name, file.stamp), lambda: _Descriptor(file))
    wanted = file.length - start if count is None else count
    content = os.pread(descriptor.number, wanted, start)
    while len(content) < wanted and (rest := os.pread(descriptor.number, wanted - len(content), start + len(content))):
        content += rest
    return content


@dataclass(frozen=True, eq=False)
class Remote:
    """An address on a remote file system, "s3://bucket", and the options for fsspec."""

    address: str
    options: Mapping[str, Any]

    def open(self) -> tuple[Any, str]:
        """Returns the file system, which fsspec caches in each process, and the path on it."""
        fsspec = import_package("fsspec", "files elsewhere need fsspec")
        try:
            opened: tuple[Any, str] = fsspec.core.url_to_fs(self.address, **self.options)
        except (ImportError, ValueError) as error:
            protocol = self.address.partition("://")[0]
            raise UnfitMachine(
                f"{protocol}:// cannot be read here: {error}; {remedy('remote')} brings what s3:// and https:// need"
            ) from error
        return opened


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A file as it was found: its path, its size in bytes if known, and its time of modification or ETag."""

    name: str
    size: int | None
    stamp: str
    remote: Remote | None = None

    @property
    def length(self) -> int:
        """The size of the file; a DataError if its server does not tell it."""
        if self.size is None:
            raise DataError(
                f"{self.name}: its server does not tell its size, which is needed to find records in it; copy the file "
                "to this machine"
            )
        return self.size

    def read(self, start: int = 0, count: int | None = None) -> bytes:
        """Returns `count` bytes from `start` on, or all; a DataError if they cannot be read or the size has changed."""
        wanted = count if count is not None or self.size is None else self.size - start
        with _readable(self.name):
            content = self._fetch(start, count) if self.remote else _read_local(self, start, count)
        if wanted is not None and len(content) != wanted:
            raise DataError(
                f"{self.name} had {self.size:,} bytes when it was found, and of the {wanted:,} from byte {start:,} on "
                f"{len(content):,} are there now; give back what it was, or on_error('skip')"
            )
        return content

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills a buffer with the bytes from `start` on; a DataError as of `read`."""
        if self.remote is not None or not buffer:
            buffer[:] = self.read(start, len(buffer))
            return
        with _readable(self.name):
            descriptor = _DESCRIPTORS.get((self.name, self.stamp), lambda: _Descriptor(self))
            done = 0
            while done < len(buffer) and (count := os.preadv(descriptor.number, [buffer[done:]], start + done)):
                done += count
        if done < len(buffer):
            raise DataError(
                f"{self.name} had {self.size:,} bytes when it was found, and of the {len(buffer):,} from byte "
                f"{start:,} on {done:,} are there now; give back what it was"
            )

    def open(self) -> Any:
        """Opens the file in binary mode; a DataError if it cannot be read or its size has changed."""
        with _readable(self.name):
            if self.remote is None:
                self.require(os.stat(self.name).st_size)
                return open(self.name, "rb")
            return self.remote.open()[0].open(self.name, "rb")

    def require(self, size: int) -> None:
        """Raises a DataError if the size has changed since the file was found."""
        if size != self.size:
            raise DataError(
                f"{self.name} had {self.size:,} bytes when it was found and has {size:,} now; "
                "give back what it was, or on_error('skip')"
            )

    def _fetch(self, start: int, count: int | None) -> bytes:
        assert self.remote is not None
        system, _ = self.remote.open()
        if count == 0:
            return b""
        if count is not None and self.size and "http" in system.protocol:
            return self._fetch_range(system, start, count)
        content: bytes = system.cat_file(self.name, start=start or None, end=None if count is None else start + count)
        return content

    def _fetch_range(self, system: Any, start: int, count: int) -> bytes:
        """Reads a range by HTTP: of a server that sends the whole file in its place, not more than was asked for."""
        try:
            with system.open(self.name, "rb", size=self.size, cache_type="none") as file:
                if not start and count < self.length:
                    # From the beginning on, such a server seems to know them.
                    file.seek(count)
                    file.read(1)
                file.seek(start)
                content: bytes = file.read(count)
        except ValueError as error:
            raise DataError(
                f"{self.name}: its server sends the whole file where {count:,} bytes from byte {start:,} on were asked "
                "for, so it knows no ranges (HTTP 206); copy the file to this machine, or serve it by one that does"
            ) from error
        return content


class Window:
    """A buffer over a file for scans from its beginning to its end that skip most of it."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._length = 1 << 16 if file.remote is None else 1 << 23
        self._first = 0
        self._content = b""

    def at(self, start: int, count: int) -> bytes:
        """Returns `count` bytes from `start` on; fewer at the file's end."""
        begin = start - self._first
        if begin < 0 or begin + count > len(self._content):
            left = max(0, self._file.length - start)
            self._content = self._file.read(start, min(left, max(count, self._length)))
            self._first, begin = start, 0
        return self._content[begin : begin + count]


def find_files(
    where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: Mapping[str, Any]
) -> list[SourceFile]:
    """Returns the files that match patterns, those of each in the order of their names; a DataError if one has none."""
    patterns = [os.fspath(pattern) for pattern in ([where] if isinstance(where, str | os.PathLike) else where)]
    if options and not any("://" in pattern for pattern in patterns):
        raise UsageError(f"{', '.join(options)}: there is no such parameter, and files of this machine need none")
    matching: list[SourceFile] = []
    for pattern in patterns:
        files = _remote(pattern, options) if "://" in pattern else _local(pattern)
        if not files:
            # Some remote file systems report an unreachable server as an empty folder.
            why = "or its server cannot be reached" if "://" in pattern else f"from {os.getcwd()}"
            raise DataError(f"no file is found by {pattern!r} ({why}); give another pattern")
        matching += sorted(files, key=lambda file: file.name)
    if not matching:
        raise DataError("no file is found, because no pattern is given")
    return matching


def _local(pattern: str) -> list[SourceFile]:
    expanded = os.path.expanduser(pattern)
    # A file's name may contain characters of a pattern.
    names = [expanded] if os.path.isfile(expanded) else glob.glob(expanded, recursive=True)
    files = []
    for name in names:
        if os.path.isfile(name):
            status = os.stat(name)
            # Absolute, since a worker may run in another folder.
            files.append(SourceFile(os.path.abspath(name), status.st_size, str(status.st_mtime_ns)))
    return files


def _remote(pattern: str, options: Mapping[str, Any]) -> list[SourceFile]:
    remote = Remote(pattern, options)
    system, path = remote.open()
    # Files may have come, or been mended, since this process asked before.
    system.invalidate_cache()
    try:
        details = system.glob(path, detail=True)
        known = {name: detail if detail.get("size") else system.info(name) for name, detail in details.items()}
    except Exception as error:
        raise DataError(f"{pattern} cannot be listed: {error or repr(error)}") from error
    files = []
    for name, detail in known.items():
        if detail.get("type") != "directory":
            stamps = (str(detail[key]) for key in _STAMPS if detail.get(key))
            files.append(SourceFile(name, detail.get("size"), next(stamps, ""), remote))
    return files


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:  # clients of file systems have their own errors
        raise unreadable(name, error) from error


def unreadable(name: str, error: Exception) -> DataError:
    said = error.strerror if isinstance(error, OSError) else ""
    return DataError(f"{name} cannot be read: {said or str(error) or repr(error)}")


def map_files(function: Callable[[SourceFile], T], files: Sequence[SourceFile]) -> list[T]:
    """Returns `function(file)` for every file; remote files in parallel."""
    if files[0].remote is None or len(files) == 1:
        return [function(file) for file in files]
    with ThreadPoolExecutor(min(_LISTED_AT_ONCE, len(files))) as pool:
        return list(pool.map(function, files))


class FileSource(Source):
    """Examples that lie in files, one file after the other.

    `lengths` are the examples of each file; `how` describes reading options that change the examples. `unit` names an
    example of a file in messages, counted from 0.
    """

    unit = "record"

    def __init__(self, kind: str, files: Sequence[SourceFile], lengths: Iterable[int], *how: Any) -> None:
        self._files = tuple(files)
        self._spans = Spans(lengths)
        self._how = " ".join([kind, *map(str, how)])

    def __len__(self) -> int:
        return self._spans.begins[-1]

    def key(self, index: int) -> str:
        at, number = self._spans.find(index)
        return f"{self._files[at].name}, {self.unit} {number}"

    @property
    def identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for file in self._files:
            digest.update(repr((file.name, file.size, file.stamp)).encode(errors="surrogateescape"))
        return f"{self._how} {len(self._files)} files {digest.hexdigest()}"
