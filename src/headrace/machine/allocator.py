"""What the C library does with free memory."""

from __future__ import annotations

import ctypes
import os

# Numbers of `mallopt` (malloc.h).
TRIM_THRESHOLD = -1
"""Of bytes that are free at the heap's end, and kept."""
TOP_PAD = -2
"""Of bytes that the heap grows by beyond what is asked for."""
MMAP_THRESHOLD = -3
"""Of bytes from which on a piece is mapped by itself."""
MOST_ARENAS = -8
"""Of pieces of memory that threads take theirs from."""

_LEAST_MAPPED = 128 << 10
"""Bytes; what the GNU C library begins with."""
_MADV_HUGEPAGE = 14
_LIBRARY = ctypes.CDLL(None)

# Not every C library has them.
_mallopt = getattr(_LIBRARY, "mallopt", None)
_malloc_trim = getattr(_LIBRARY, "malloc_trim", None)


def give_back() -> None:
    """Returns free memory to the system, which the C library otherwise keeps."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def give_back_at_once() -> None:
    """From now on, free memory is the system's at once, as far as that can be: in place of time, memory is saved.

    Large pieces are mapped by themselves. In the heap, what they leave would lie between what stays.
    """
    for option in (MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD):
        tune(option, _LEAST_MAPPED)
    give_back()


def tune(option: int, value: int) -> None:
    """Sets an option of the C library's allocator, as the environment does for a program that starts."""
    if _mallopt is not None:
        _mallopt(option, value)


def prefer_large_pages(nbytes: int) -> None:
    """Asks for large pages in the next bytes that the heap grows by; a system that has none leaves them small.

    Args:
        nbytes: fewer than `MMAP_THRESHOLD` and `TRIM_THRESHOLD`, so that they belong to the heap and stay there.
    """
    _LIBRARY.malloc.restype = ctypes.c_void_p
    # None of it is touched, so no memory is taken.
    block = _LIBRARY.malloc(ctypes.c_size_t(nbytes))
    if block:
        page = os.sysconf("SC_PAGESIZE")
        begin = -(-block // page) * page
        madvise = getattr(_LIBRARY, "madvise", None)
        if madvise is not None:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes - page), _MADV_HUGEPAGE)
        _LIBRARY.free(ctypes.c_void_p(block))
