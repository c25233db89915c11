"""Disks that are full or fail, and what is on them."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""Why a path leads to nothing."""


def mode_of(path: Path) -> int:
    """Returns the mode of what a path leads to, 0 where there is nothing; raises OSError where that cannot be told.

    From Python 3.14 on, `exists`, `is_dir` and `is_file` of `Path` say no in that case: the disk of a run that fails
    would be a run that is gone, and a file that this user may not see one that does not exist.
    """
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno not in _NOTHING:
            raise
    except ValueError:
        pass  # a NUL in the name
    return 0


def exists(path: Path) -> bool:
    """Tells whether a path leads to something; raises OSError where that cannot be told."""
    return bool(mode_of(path))


def is_folder(path: Path) -> bool:
    """Tells whether a path leads to a folder; raises OSError where that cannot be told."""
    return stat.S_ISDIR(mode_of(path))


def is_file(path: Path) -> bool:
    """Tells whether a path leads to a file, no pipe and no device; raises OSError where that cannot be told."""
    return stat.S_ISREG(mode_of(path))


def is_full(folder: Path) -> bool:
    """Tells whether this process can add nothing to the file system of a folder."""
    status = os.statvfs(folder)
    return not (status.f_bavail if os.geteuid() else status.f_bfree)


def is_left(lock: Path) -> bool:
    """Tells whether the process that has locked a file, and has its number in it, is gone, and all that inherit it."""
    try:
        with lock.open("rb") as file:
            number = file.read(20)
            # A process that lives is not disturbed by a second lock.
            if not number.isdigit() or exists(Path(f"/proc/{int(number)}")):
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def disk_fails(error: OSError) -> bool:
    """Tells whether the disk itself fails, or the way to one of another host: what was asked for may be there."""
    unmounted = error.errno == errno.ENOTCONN and error.filename is not None
    return unmounted or error.errno in (errno.EIO, errno.ESTALE)


def takes_no_more(error: OSError) -> bool:
    """Tells whether the disk is full, fails or must not be written to: no reason to end the training."""
    return disk_fails(error) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextmanager
def unless(expected: Callable[[OSError], bool]) -> Iterator[None]:
    """Leaves out the rest of its block after an expected error: for what is tried again, or is not needed."""
    try:
        yield
    except OSError as error:
        if not expected(error):
            raise
