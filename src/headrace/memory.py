"""This process's memory: what the system says of it, and what the C library does with what is free."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Numbers of `mallopt` (malloc.h).
TRIM_THRESHOLD = -1
"""Of bytes that are free at the heap's end, and kept."""
TOP_PAD = -2
"""Of bytes that the heap grows by beyond what is asked for."""
MMAP_THRESHOLD = -3
"""Of bytes from which on a piece is mapped by itself."""
MOST_ARENAS = -8
"""Of pieces of memory that threads take theirs from."""

_MADV_HUGEPAGE = 14

# Not every C library has them.
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident_bytes() -> int:
    """Returns how much of it lies in the machine's memory."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")


def give_back() -> None:
    """Gives what is free back to the system, where it is else kept for the next who asks."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def tune(option: int, value: int) -> None:
    """Says how memory is kept from now on: what the environment says to a program that begins."""
    if _mallopt is not None:
        _mallopt(option, value)


def prefer_large_pages(nbytes: int) -> None:
    """Asks for large pages in the next bytes that the heap grows by; a system that has none leaves them small.

    Args:
        nbytes: fewer than `MMAP_THRESHOLD` and `TRIM_THRESHOLD`, so that they are the heap's and stay so.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    # Nothing in it is touched, and so nothing is taken.
    block = library.malloc(ctypes.c_size_t(nbytes))
    if block:
        page = os.sysconf("SC_PAGESIZE")
        begin = -(-block // page) * page
        madvise = getattr(library, "madvise", None)
        if madvise is not None:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes - page), _MADV_HUGEPAGE)
        library.free(ctypes.c_void_p(block))
