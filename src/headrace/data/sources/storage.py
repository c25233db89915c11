"""Files on this machine and on any file system that fsspec knows: found by a pattern, read in pieces by anyone."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.errors import DataError, HeadraceError, UnfitMachine, UsageError

T = TypeVar("T")

OPEN = 64
"""Files that a process keeps open."""
_LISTED_AT_ONCE = 16
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


class _Descriptor:
    """A file of this machine, open until nobody reads it any more."""

    def __init__(self, file: SourceFile) -> None:
        self.number = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
        file.require(os.fstat(self.number).st_size)

    def __del__(self) -> None:
        if "number" in self.__dict__:
            os.close(self.number)


class _Local:
    """This machine's files, read at an offset, so that threads and forks may share what is open."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, str], _Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, file: SourceFile, start: int, count: int | None) -> bytes:
        # Whoever reads a whole file will not come back to it soon.
        descriptor = _Descriptor(file) if count is None else self._descriptor(file)
        wanted = file.length - start if count is None else count
        content = os.pread(descriptor.number, wanted, start)
        while len(content) < wanted and (
            rest := os.pread(descriptor.number, wanted - len(content), start + len(content))
        ):
            content += rest
        return content

    def after_fork(self) -> None:
        # Another thread may have held it when this process was forked.
        self._lock = threading.Lock()

    def _descriptor(self, file: SourceFile) -> _Descriptor:
        key = (file.name, file.stamp)
        with self._lock:
            found = self._open.pop(key, None) or _Descriptor(file)
            self._open[key] = found
            if len(self._open) > OPEN:
                # Whoever reads it still holds it.
                self._open.popitem(last=False)
        return found


_LOCAL = _Local()
os.register_at_fork(after_in_child=_LOCAL.after_fork)


@dataclass(frozen=True, eq=False)
class Remote:
    """A file system of fsspec, which every process opens for itself.

    Attributes:
        address: any on it, "s3://bucket".
        options: as fsspec takes them.
    """

    address: str
    options: Mapping[str, Any]

    def open(self) -> tuple[Any, str]:
        """Returns the file system, and the address as it calls it; fsspec keeps one for each process and options.

        Raises:
            UnfitMachine: what it needs is not installed.
        """
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
    """A file as it was when it was found.

    Attributes:
        name: its path, as its file system calls it.
        size: in bytes; None where the file system does not tell.
        stamp: what changes with its content: time of modification or ETag.
        remote: where it lies, if not on this machine.
    """

    name: str
    size: int | None
    stamp: str
    remote: Remote | None = None

    @property
    def length(self) -> int:
        """Its size, where records are looked for in it.

        Raises:
            DataError: the file system does not tell it.
        """
        if self.size is None:
            raise DataError(
                f"{self.name}: its server does not tell its size, and to find records in it needs that; copy the file "
                "to this machine"
            )
        return self.size

    def read(self, start: int = 0, count: int | None = None) -> bytes:
        """Returns `count` bytes from `start` on; None for all.

        Raises:
            DataError: the file is gone, has another size than it had, or cannot be read.
        """
        wanted = count if count is not None or self.size is None else self.size - start
        try:
            content = self._fetch(start, count) if self.remote else _LOCAL.read(self, start, count)
        except HeadraceError:
            raise
        except Exception as error:
            # Clients of file systems have errors of their own.
            raise unreadable(self.name, error) from error
        if wanted is not None and len(content) != wanted:
            raise DataError(
                f"{self.name} had {self.size:,} bytes when it was found, and of the {wanted:,} from byte {start:,} on "
                f"{len(content):,} are there now; give back what it was, or on_error('skip')"
            )
        return content

    def open(self) -> Any:
        """Returns it as an open binary file.

        Raises:
            DataError: it is gone, or has another size than it had.
        """
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
        """Makes sure that it is as long as when it was found.

        Raises:
            DataError: it is not.
        """
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
    """Reads a file from its beginning to its end in pieces, for scans that jump over what they need not see.

    Args:
        file: which.
    """

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


def find(
    where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: Mapping[str, Any]
) -> list[SourceFile]:
    """Returns the files that patterns find, those of each in the order of their names.

    Raises:
        DataError: one finds none.
        UsageError: there are options, but no file system that would take them.
        UnfitMachine: what a file system needs is not installed.
    """
    patterns = [where] if isinstance(where, str | os.PathLike) else list(where)
    if options and not any("://" in os.fspath(each) for each in patterns):
        raise UsageError(f"{', '.join(options)}: there is no such parameter, and files of this machine need none")
    found: list[SourceFile] = []
    for pattern in [os.fspath(each) for each in patterns]:
        files = _remote(pattern, options) if "://" in pattern else _local(pattern)
        if not files:
            # File systems elsewhere may call what cannot be reached what is not there.
            why = "or its server cannot be reached" if "://" in pattern else f"from {os.getcwd()}"
            raise DataError(f"no file is found by {pattern!r} ({why}); give another pattern")
        found += sorted(files, key=lambda file: file.name)
    if not found:
        raise DataError("no file is found, because no pattern is given")
    return found


def _local(pattern: str) -> list[SourceFile]:
    expanded = os.path.expanduser(pattern)
    # A name may hold what would be a pattern.
    names = [expanded] if os.path.isfile(expanded) else glob.glob(expanded, recursive=True)
    files = []
    for name in names:
        if os.path.isfile(name):
            status = os.stat(name)
            # Absolute, since a worker may run elsewhere.
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
    """Returns the error of a file that cannot be read."""
    said = error.strerror if isinstance(error, OSError) else ""
    return DataError(f"{name} cannot be read: {said or str(error) or repr(error)}")


def each(function: Callable[[SourceFile], T], files: Sequence[SourceFile]) -> list[T]:
    """Returns `function(file)` for every file; several at a time where they lie elsewhere."""
    if files[0].remote is None or len(files) == 1:
        return [function(file) for file in files]
    with ThreadPoolExecutor(min(_LISTED_AT_ONCE, len(files))) as pool:
        return list(pool.map(function, files))


def identity_of(kind: str, files: Sequence[SourceFile], *details: Any) -> str:
    """Returns what a source reads from: a digest of the files as they were found, and how it reads them."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(repr((file.name, file.size, file.stamp)).encode(errors="surrogateescape"))
    return " ".join([kind, *map(str, details), f"{len(files)} files", digest.hexdigest()])
