"""Memory that several processes share: anonymous files, passed by descriptor.

Nothing appears in /dev/shm, only processes of the same user can open one, and it is freed when the last process that
holds it closes it or dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings

import torch
from torch import Tensor

from headrace.errors import UnfitMachine
from headrace.machine.resources import spare_memory_bytes
from headrace.shared_memory.mapping import mapped, use_large_pages


def memory_file(label: str) -> int:
    """Returns the descriptor of a new file in memory that only its owner may open; `label` is in /proc/<pid>/maps."""
    descriptor = os.memfd_create(f"headrace-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Tells whether the file behind a descriptor cannot be shortened."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False  # a kind of file that has no seals


def set_length(descriptor: int, nbytes: int, label: str) -> None:
    """Sets the length of a file in memory; an UnfitMachine if the user's limit of file sizes is below it."""
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        what = f"the {label} segment needs {nbytes:,} bytes, and the limit of file sizes (RLIMIT_FSIZE) is below that"
        raise UnfitMachine(what).with_remedy("raise it, such as by `ulimit -f unlimited`") from error


_LARGE_BYTES = 4 << 20
"""From so many bytes on, large pages pay for the copy that makes them."""


class SharedSegment:
    """One mapped segment of shared memory, `nbytes` long."""

    def __init__(self, descriptor: int, nbytes: int, writable: bool = True, populate: bool = True) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.memory = mapped(descriptor, nbytes, writable, populate)

    @classmethod
    def create(cls, nbytes: int, label: str, lasting: bool = False) -> SharedSegment:
        """Makes a zeroed segment. An UnfitMachine if too little memory is left.

        Args:
            nbytes: of the segment.
            label: shows in /proc/<pid>/maps.
            lasting: it is used again and again, or by several processes: from 4 MiB on, it gets large pages where the
                system has them.
        """
        available = spare_memory_bytes()
        if nbytes > available:
            raise UnfitMachine(
                f"the {label} segment needs {nbytes:,} bytes of shared memory and the machine has {available:,} "
                "left; use fewer workers or a smaller model, or close what fills the memory"
            )
        descriptor = memory_file(label)
        try:
            set_length(descriptor, nbytes, label)
            # Allocated now, so that a full machine is an error here and not a SIGBUS in the middle of a step.
            os.posix_fallocate(descriptor, 0, nbytes)
            # A process that maps a file dies if another one shortens it.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            large = lasting and nbytes >= _LARGE_BYTES
            # To map small pages that are to be replaced would take longer than all the rest.
            made = cls(descriptor, nbytes, populate=not large)
            if large and not use_large_pages(made.memory):
                made = cls(descriptor, nbytes)
            return made
        except UnfitMachine:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise UnfitMachine(
                f"the {label} segment needs {nbytes:,} bytes of shared memory and the system refused "
                f"({error.strerror}); {available:,} bytes looked free: is there a memory limit on this container?"
            ) from error

    @classmethod
    def open(cls, pid: int, descriptor: int, nbytes: int) -> SharedSegment:
        """Maps a segment that a process of the same user holds; an UnfitMachine if it cannot be seen from here."""
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            duplicate = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise UnfitMachine(
                f"cannot open the shared memory of process {pid} ({path}: {error.strerror}); the workers of a host "
                "must run as one user and see each other's processes (one PID namespace)"
            ) from error
        try:
            return cls(duplicate, nbytes)
        except BaseException:
            os.close(duplicate)
            raise

    @classmethod
    def received(cls, descriptor: int, nbytes: int, writable: bool = True) -> SharedSegment:
        """Maps a segment whose descriptor was received.

        A ValueError if it has another length or may change it; an OSError if it is no memory that can be mapped.
        """
        try:
            if not is_sealed(descriptor) or os.fstat(descriptor).st_size != nbytes:
                raise ValueError(f"the shared memory that was sent is not {nbytes:,} bytes for good")
            return cls(descriptor, nbytes, writable)
        except BaseException:
            os.close(descriptor)
            raise

    def tensor(self, dtype: torch.dtype = torch.uint8, start: int = 0, count: int = -1) -> Tensor:
        """Returns `(count,)` elements of `dtype` from byte `start` on, in place; not to be changed unless writable."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
            return torch.frombuffer(self.memory, dtype=dtype, offset=start, count=count)

    def close(self) -> None:
        """Closes the file; the memory is freed with the last tensor on it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
