"""Disks that are full or fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def is_full(folder: Path) -> bool:
    """Tells whether this process can add nothing to the file system of a folder."""
    found = os.statvfs(folder)
    return not (found.f_bavail if os.geteuid() else found.f_bfree)


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
