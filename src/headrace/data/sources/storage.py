"""Files on this machine and on any file system that fsspec knows, and sources of examples that lie in them."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.data.pipeline.source import Source
from headrace.data.sources.pieces import BoundedCache, Spans
from headrace.errors import DataError, HeadraceError, UnfitMachine, UsageError

T = TypeVar("T")

OPEN = 64
"""Files that a process keeps open."""
_LISTED_AT_ONCE = 16
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


class _Descriptor:
    """An open file of this machine; closed when the last reader lets go of it."""

    def __init__(self, file: SourceFile) -> None:
        self.number = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
        file.require(os.fstat(self.number).st_size)

    def __del__(self) -> None:
        if "number" in self.__dict__:
            os.close(self.number)


_DESCRIPTORS: BoundedCache[_Descriptor] = BoundedCache(OPEN, lambda _: 1)
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
    """A remote file system: an address on it, "s3://bucket", and the options for fsspec."""

    address: str
    options: Mapping[str, Any]

    def open(self) -> tuple[Any, str]:
        """Returns the file system, which fsspec caches in each process, and the path on it."""
        try:
            import fsspec
        except ImportError as error:
            raise UnfitMachine(f'files elsewhere need fsspec ({error}); pip install "headrace[data]"') from error
        try:
            system, path = fsspec.core.url_to_fs(self.address, **self.options)
        except (ImportError, ValueError) as error:
            raise UnfitMachine(f"{self.address.partition('://')[0]}:// cannot be read here: {error}") from error
        return system, path


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A file as it was found: its path, its size in bytes if known, and its time of modification or ETag."""

    name: str
    size: int | None
    stamp: str
    remote: Remote | None = None

    @property
    def length(self) -> int:
        """The size of the file; a DataError if it is unknown."""
        if self.size is None:
            raise DataError(
                f"{self.name}: its server does not tell its size, which is needed to find records in it; copy the file "
                "to this machine"
            )
        return self.size

    def read(self, start: int = 0, count: int | None = None) -> bytes:
        """Returns `count` bytes from `start` on, or all; a DataError if they cannot be read or the size has changed."""
        wanted = count if count is not None or self.size is None else self.size - start
        try:
            content = self._fetch(start, count) if self.remote else _read_local(self, start, count)
        except HeadraceError:
            raise
        except Exception as error:
            # Clients of file systems have their own errors.
            raise unreadable(self.name, error) from error
        if wanted is not None and len(content) != wanted:
            raise DataError(
                f"{self.name} had {self.size:,} bytes when it was found, and of the {wanted:,} from byte {start:,} on "
                f"{len(content):,} are there now; give back what it was, or on_error('skip')"
            )
        return content

    def open(self) -> Any:
        """Opens the file in binary mode; a DataError if it cannot be read or its size has changed."""
        try:
            if self.remote is None:
                self.require(os.stat(self.name).st_size)
                return open(self.name, "rb")
            return self.remote.open()[0].open(self.name, "rb")
        except HeadraceError:
            raise
        except Exception as error:
            raise unreadable(self.name, error) from error

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
        if count is None:
            content: bytes = system.cat_file(self.name, start=start or None)
            return content
        if count == 0:
            return b""
        content = system.cat_file(self.name, start=start, end=start + count)
        if len(content) > count:
            raise DataError(
                f"{self.name}: its server sends {len(content):,} bytes where {count:,} were asked for, so it knows no "
                "ranges (HTTP 206); copy the file to this machine, or serve it by one that does"
            )
        return content


class Window:
    """A buffer over a file for scans from its beginning to its end that skip most of it."""

    _LOCAL_BYTES = 1 << 16
    _REMOTE_BYTES = 1 << 23

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._length = self._LOCAL_BYTES if file.remote is None else self._REMOTE_BYTES
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
    """Returns the files that match patterns, those of each pattern in the order of their names.

    A pattern without a match is a DataError; options without a remote file system, a UsageError.
    """
    patterns = [os.fspath(each) for each in ([where] if isinstance(where, str | os.PathLike) else where)]
    if options and not any("://" in pattern for pattern in patterns):
        raise UsageError(f"{', '.join(options)}: there is no such parameter, and files of this machine need none")
    found: list[SourceFile] = []
    for pattern in patterns:
        files = _remote(pattern, options) if "://" in pattern else _local(pattern)
        if not files:
            # Some remote file systems report an unreachable server as an empty folder.
            why = "or its server cannot be reached" if "://" in pattern else f"from {os.getcwd()}"
            raise DataError(f"no file is found by {pattern!r} ({why}); give another pattern")
        found += sorted(files, key=lambda file: file.name)
    if not found:
        raise DataError("no file is found, because no pattern is given")
    return found


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
    try:
        details = system.glob(path, detail=True)
        told = {name: each if each.get("size") else system.info(name) for name, each in details.items()}
    except Exception as error:
        raise DataError(f"{pattern} cannot be listed: {error or repr(error)}") from error
    files = []
    for name, each in told.items():
        if each.get("type") != "directory":
            stamps = (str(each[key]) for key in _STAMPS if each.get(key))
            files.append(SourceFile(name, each.get("size"), next(stamps, ""), remote))
    return files


def unreadable(name: str, error: Exception) -> DataError:
    """Returns the error for a file that cannot be read."""
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

    `lengths` are the examples of each file; `how` describes reading options that change the examples.
    """

    def __init__(self, kind: str, files: Sequence[SourceFile], lengths: Iterable[int], *how: Any) -> None:
        self._files = tuple(files)
        self._spans = Spans(lengths)
        self._how = " ".join([kind, *map(str, how)])

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for file in self._files:
            digest.update(repr((file.name, file.size, file.stamp)).encode(errors="surrogateescape"))
        return f"{self._how} {len(self._files)} files {digest.hexdigest()}"


class RecordSource(FileSource):
    """One byte range an example; `places` has for each file where the records begin and, last, where they end."""

    def __init__(self, kind: str, files: Sequence[SourceFile], places: Sequence[NDArray[np.int64]]) -> None:
        super().__init__(kind, files, [len(each) - 1 for each in places])
        self._places = tuple(places)

    def nbytes(self, index: int) -> int | None:
        _, _, start, stop = self._locate(index)
        return stop - start

    def _locate(self, index: int) -> tuple[int, int, int, int]:
        """Returns the file, the number of the record in it, and its range of bytes."""
        at, record = self._spans.find(index)
        start, stop = self._places[at][record : record + 2].tolist()
        return at, record, start, stop
