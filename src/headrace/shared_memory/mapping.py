"""Maps files in memory so that the system can use large pages for them."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

LARGE_PAGE_BYTES = 2 << 20
"""Of x86-64, and of AArch64 with its usual small pages. Elsewhere the system refuses, and the pages stay small."""

_FIXED, _COLLAPSE = 0x10, 25
"""MAP_FIXED and MADV_COLLAPSE (Linux 6.1), which Python's mmap does not have."""

_LIBRARY = ctypes.CDLL(None, use_errno=True)
_FAILED = ctypes.c_void_p(-1).value

_mmap, _munmap, _madvise = _LIBRARY.mmap, _LIBRARY.munmap, _LIBRARY.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def mapped(descriptor: int, nbytes: int, writable: bool = True, populate: bool = True) -> memoryview:
    """Maps a file, shared; the mapping ends with the last object that uses it. An OSError if the system refuses.

    A file of a large page or more begins at a multiple of it: only there the system can use large pages. `populate`
    maps its pages now, not one by one when they are used.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    if nbytes < LARGE_PAGE_BYTES:
        address = _map(None, nbytes, protection, flags, descriptor)
    else:
        address = _map_aligned(nbytes, protection, flags, descriptor)
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(array, _munmap, address, nbytes).atexit = False
    memory = np.frombuffer(memoryview(array), dtype=np.uint8).data
    return memory if writable else memory.toreadonly()


def use_large_pages(memory: memoryview) -> bool:
    """Moves what is mapped into large pages, for every process that maps it; tells whether the system did.

    It costs the copy of the memory. A system without free large pages, or older than Linux 6.1, refuses.
    """
    nbytes = memory.nbytes // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if not nbytes:
        return False
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    return bool(_madvise(address, nbytes, _COLLAPSE) == 0)


def _map(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int = _mmap(address, nbytes, protection, flags, descriptor, 0)
    if mapped == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return mapped


def _map_aligned(nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    # Addresses without memory, of which those around the file are given back.
    length = nbytes + LARGE_PAGE_BYTES
    reserved = _map(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    try:
        _map(address, nbytes, protection, flags | _FIXED, descriptor)
    except OSError:
        _munmap(reserved, length)
        raise
    if address > reserved:
        _munmap(reserved, address - reserved)
    end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if end < reserved + length:
        _munmap(end, reserved + length - end)
    return address
