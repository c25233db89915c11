"""What this process holds of the machine, and what of it has come since.

Things are told apart, not counted: in a process of hundreds of tests what an earlier one has left goes away at any
time. A count that falls by that is no leak, and would hide one.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace.engine.local.engine import close_kept_engine

__all__ = ["OTHERS", "belongings", "descriptors", "left_since", "named_shared_memory", "private_bytes"]

OTHERS = ("sem.", "torch_", "headrace-fuzz-")
"""Semaphores of Python, files of torch and of fuzzers are of what runs beside a test; the package gives no such names.

The C library creates a semaphore as `sem.` and six random characters before it has its own name, `sem.mp-...`.
"""


def private_bytes(pid: int | str = "self") -> int:
    """Returns how much memory of a process's own is resident.

    Without that of files: which pages of a library are resident, the system decides, megabytes at a time.
    """
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


def descriptors() -> set[tuple[int, int, int, str]]:
    """Returns number, device, inode and name of each that is open."""
    gc.collect()
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        # One of them was the list itself.
        with suppress(OSError):
            status = os.fstat(number)
            found.add((number, status.st_dev, status.st_ino, os.readlink(f"/proc/self/fd/{number}")))
    return found


def named_shared_memory() -> set[str]:
    """Returns the names that shared memory has on this machine, without those of what runs beside."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OTHERS)}


def belongings() -> dict[str, set[object]]:
    """Returns threads, children, descriptors, and shared memory that has a name or is mapped.

    The engine that `fit` keeps for the next call is ended first, so that all else is seen.
    """
    close_kept_engine()
    # Before all else, because it collects objects without references.
    held: set[object] = set(descriptors())
    maps = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {
        "threads": set(threading.enumerate()),
        "children": set(_children()),
        "descriptors": held,
        "named shared memory": set(named_shared_memory()),
        "mapped shared memory": {(inode, name) for *_, inode, name in maps if name.startswith("/memfd:headrace")},
    }


def left_since(before: dict[str, set[object]], within_s: float = 0.0) -> dict[str, set[object]]:
    """Returns what there is that was not there before, and is still there after some time; {} if nothing is left."""
    deadline = time.monotonic() + within_s
    while (left := _added(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _added(before: dict[str, set[object]]) -> dict[str, set[object]]:
    return {what: added for what, held in belongings().items() if (added := held - before[what])}


def _children() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            yield from (task / "children").read_text().split()
