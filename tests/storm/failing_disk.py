"""A folder as a file system that fails on demand (FUSE): python tests/storm/failing_disk.py BEHIND FOLDER SWITCH."""

from __future__ import annotations

import ctypes.util
import errno
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["ALL", "POSSIBLE", "WRITES"]

POSSIBLE = (
    os.geteuid() == 0
    and Path("/dev/fuse").exists()
    and ctypes.util.find_library("fuse3") is not None
    and find_spec("mfusepy") is not None
)
"""Whether this machine lets us make one: as root, with Debian's libfuse3-3 and Python's mfusepy."""

WRITES, ALL = "writes", "all"
"""What the switch's file says: which operations fail. Without the file none does."""

STATISTICS = (
    "f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_flag", "f_frsize", "f_namemax",
)  # fmt: skip

T = TypeVar("T")


def main(behind: str, folder: str, switch: str) -> int:
    """Serves the folder until it is unmounted."""
    # Imported here: who only asks whether it is possible may not have it.
    import mfusepy

    # Nothing is remembered of names and attributes: the folder behind changes also from elsewhere.
    mfusepy.FUSE(_operations(Path(behind), Path(switch), mfusepy.Operations), folder, foreground=True,
                 attr_timeout=0, entry_timeout=0, negative_timeout=0)  # fmt: skip
    return 0


def _operations(behind: Path, switch: Path, base: type[Any]) -> Any:
    def state() -> str:
        try:
            return switch.read_text()
        except FileNotFoundError:
            return ""

    def failing(*states: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
        def wrapped(operation: Callable[..., T]) -> Callable[..., T]:
            @wraps(operation)
            def attempted(*arguments: Any) -> T:
                if state() in states:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return operation(*arguments)

            return attempted

        return wrapped

    reads, writes = failing(ALL), failing(ALL, WRITES)

    def at(path: str) -> str:
        return f"{behind}{path}"

    class Operations(base):  # type: ignore[misc]
        """Does everything in the folder behind."""

        use_ns = True

        @reads
        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            status = os.lstat(at(path))
            seconds = {name: getattr(status, f"{name}_ns") for name in ("st_atime", "st_ctime", "st_mtime")}
            others = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid", "st_ino", "st_blocks")
            return seconds | {name: getattr(status, name) for name in others}

        @reads
        def statfs(self, path: str) -> dict[str, int]:
            status = os.statvfs(at(path))
            return {name: getattr(status, name) for name in STATISTICS}

        @reads
        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(at(path))]

        @reads
        def open(self, path: str, flags: int) -> int:
            if flags & os.O_ACCMODE != os.O_RDONLY and state() == WRITES:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return os.open(at(path), flags & ~os.O_APPEND)

        @reads
        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        @writes
        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        @writes
        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        @writes
        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(at(path) if fh is None else fh, length)
            return 0

        @writes
        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        @writes
        def rename(self, old: str, new: str) -> int:
            os.rename(at(old), at(new))
            return 0

        @writes
        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(at(path), mode)
            return 0

        @writes
        def rmdir(self, path: str) -> int:
            os.rmdir(at(path))
            return 0

        @writes
        def unlink(self, path: str) -> int:
            os.unlink(at(path))
            return 0

        @writes
        def chmod(self, path: str, mode: int) -> int:
            os.chmod(at(path), mode)
            return 0

        @writes
        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(at(path), ns=times)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    return Operations()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
