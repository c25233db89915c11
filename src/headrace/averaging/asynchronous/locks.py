"""Locks of the workers of a host: each may be held by one of them, and the system releases those of one that dies."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import ExitStack

from headrace.collectives.base import ProcessGroup, gather_texts

_FLOCK = "hhqqi4x"
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""


class HostLocks:
    """One lock for each worker of a host, threads or processes.

    They are locks on the bytes of a file without a name, of one open file description for each worker (Linux's
    F_OFD_SETLKW), so that threads exclude each other, too, and nothing is left when a worker is killed.
    """

    def __init__(self, group: ProcessGroup, closing: ExitStack) -> None:
        made = os.memfd_create("headrace-locks") if group.rank == 0 else -1
        (path, *_) = gather_texts(group, f"/proc/{os.getpid()}/fd/{made}")
        self._file = made if group.rank == 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        closing.callback(os.close, self._file)
        # All have opened it.
        group.barrier()

    def take(self, number: int) -> None:
        """Waits for a lock, and holds it; several are taken in order of number, so that none waits in a circle."""
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))

    def release(self, number: int) -> None:
        """Gives a lock back."""
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))
