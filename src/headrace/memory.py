"""This process's memory: what the system says of it, and what the C library does with what is free."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["MMAP_THRESHOLD", "MOST_ARENAS", "TOP_PAD", "TRIM_THRESHOLD", "give_back", "resident_bytes", "tune"]

# Numbers of `mallopt` (malloc.h).
TRIM_THRESHOLD = -1
"""Of bytes that are free at the heap's end, and kept."""
TOP_PAD = -2
"""Of bytes that the heap grows by beyond what is asked for."""
MMAP_THRESHOLD = -3
"""Of bytes from which on a piece is mapped by itself."""
MOST_ARENAS = -8
"""Of pieces of memory that threads take theirs from."""

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
