"""Sleeping on a word of shared memory until another process changes it: Linux futex(2).

A waiter sleeps only if the word still holds what it saw, which the kernel checks, so no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Callable
from os import sched_yield
from time import perf_counter
from typing import TypeVar

_SYSCALLS = {"x86_64": (202, 324), "aarch64": (98, 283)}  # futex, membarrier
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_MEMBARRIER_GLOBAL = 1

_MACHINE = platform.machine()
_FUTEX, _MEMBARRIER = _SYSCALLS.get(_MACHINE, (-1, -1))

# A sleeper lets go of the interpreter; waking takes less time than letting go of it would.
_sleeping = ctypes.CDLL(None, use_errno=True).syscall
_brief = ctypes.PyDLL(None, use_errno=True).syscall
for _call in (_sleeping, _brief):
    _call.restype = ctypes.c_long
_sleeping.argtypes = [
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int
]  # fmt: skip
_brief.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleeps until the 32-bit word at `address` is woken, `timeout_s` is over, or it is not `seen` any more."""
    seconds = int(timeout_s)
    timeout = struct.pack("qq", seconds, int((timeout_s - seconds) * 1e9))
    _sleeping(_FUTEX, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, timeout, None, 0)


def wake(address: int) -> None:
    """Wakes everybody who sleeps on the word at `address`."""
    _brief(_FUTEX, address, _FUTEX_WAKE, _EVERYBODY)


def fence() -> None:
    """Makes what was written before visible before what is written after.

    x86-64 keeps the order of plain stores by itself; elsewhere the kernel's membarrier(2) does it.
    """
    if _MACHINE != "x86_64":
        _brief(_MEMBARRIER, _MEMBARRIER_GLOBAL, 0, 0)


_Event = TypeVar("_Event")

_LEAST_S = 1e-6


class Spin:
    """To be woken takes far longer than to look, on idle cores of a virtual machine ten times.

    How long is learnt: a look that met what it waited for may be longer next time, one in vain is halved, so that on a
    crowded host hardly anyone spins.

    Args:
        most_s: the longest, seconds.

    Attributes:
        seconds: how long to look next time.
    """

    def __init__(self, most_s: float) -> None:
        self.seconds = most_s
        self._most_s = most_s

    def met(self) -> None:
        """Notes that what was waited for came in time."""
        self.seconds = min(self._most_s, self.seconds * 1.25)

    def slept(self, waited_s: float) -> None:
        """Notes that it came after `waited_s`, too late for a look."""
        short = waited_s < self._most_s
        self.seconds = min(self._most_s, self.seconds * 2) if short else max(_LEAST_S, self.seconds / 2)


def look(poll: Callable[[float], list[_Event]], spin: Spin, timeout_s: float) -> list[_Event]:
    """Returns what `poll(seconds)` does within `timeout_s`; looks again and again for a while before it sleeps."""
    events = poll(0.0)
    if events or not timeout_s:
        return events
    began = perf_counter()
    give_up = began + spin.seconds
    while perf_counter() < give_up:
        # Whoever is waited for may have no other core.
        sched_yield()
        events = poll(0.0)
        if events:
            spin.met()
            return events
    events = poll(timeout_s)
    spin.slept(perf_counter() - began)
    return events
