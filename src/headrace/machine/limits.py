"""What the system refuses, told with its limit."""

from __future__ import annotations

import errno
import resource

from headrace.errors import UnfitMachine
from headrace.machine.disk import disk_fails

_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable (src/thread.cpp")
"""What Python and ZeroMQ say; the latter ends the process (SIGABRT)."""

_NO_KERNEL = "could not create a primitive"
"""What oneDNN says, by which torch computes on the CPU."""

_NO_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED", "OUT_OF_MEMORY")
"""What libraries say: torch's allocators, CUDA, cuBLAS, NCCL."""


def out_of_memory(error: BaseException) -> bool:
    """Tells whether an error says that memory ran out; torch's are RuntimeErrors."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY)
    )


def explained(error: BaseException) -> BaseException:
    """Returns a better error where one says only what the machine refuses, a disk, a file, a thread; else the same."""
    if isinstance(error, OSError) and disk_fails(error):
        return UnfitMachine(
            f"the disk fails ({error.strerror}) at {error.filename or 'a file that was open'}; see what the system's "
            "log says of it (dmesg), and name a run_dir on another disk"
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        most, what = resource.getrlimit(resource.RLIMIT_NOFILE)[0], error.filename or error.strerror
        whose = (
            f"of which a process may have {most:,} (ulimit -n)" if error.errno == errno.EMFILE else "for any process"
        )
        return UnfitMachine(
            f"the system opens no further file or socket ({what}), {whose}; raise that limit, or close what your own "
            "code leaves open"
        )
    if not isinstance(error, RuntimeError):
        return error
    if _NO_KERNEL in str(error):
        return UnfitMachine(
            f"torch has no kernel for this on this machine's processor: {str(error).partition('.')[0]}; where "
            "precision='bf16', use 'fp32': without AVX-512 there is none for an LSTM or a GRU in bf16"
        )
    return too_many_threads() if any(said in str(error) for said in _NO_THREAD) else error


def too_many_threads() -> UnfitMachine:
    """Returns the error where the system starts no further thread or process, with the limit."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    most = "as many as it likes" if limit == resource.RLIM_INFINITY else f"{limit:,} of them"
    return UnfitMachine(
        f"the system starts no further thread: this user may have {most} (ulimit -u), and its control group has a "
        "limit of its own (pids.max); raise the lower one, or run fewer workers"
    )
