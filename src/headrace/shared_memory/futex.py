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
_ALL = 2**31 - 1
_MEMBARRIER_GLOBAL = 1

_MACHINE = platform.machine()
_FUTEX, _MEMBARRIER = _SYSCALLS.get(_MACHINE, (-1, -1))

# Sleeping releases the interpreter lock; waking takes less time than releasing it would.
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
    """Wakes all that sleep on the word at `address`."""
    _brief(_FUTEX, address, _FUTEX_WAKE, _ALL)


def fence() -> None:
    """Makes what was written before visible before what is written after.

    x86-64 keeps the order of plain stores by itself; elsewhere the kernel's membarrier(2) does it.
    """
    if _MACHINE != "x86_64":
        _brief(_MEMBARRIER, _MEMBARRIER_GLOBAL, 0, 0)


_Event = TypeVar("_Event")

_LEAST_S = 1e-6


class Spin:
    """How many `seconds` to poll before sleeping, at most `most_s`.

    Waking takes far longer than polling, on idle cores of a virtual machine ten times. The time is learnt: a poll that
    succeeds may be longer next time, one that fails is halved, so that processes hardly spin on a crowded host.
    """

    def __init__(self, most_s: float) -> None:
        self.seconds = most_s
        self._most_s = most_s

    def met(self) -> None:
        """Notes that a poll succeeded."""
        self.seconds = min(self._most_s, self.seconds * 1.25)

    def slept(self, waited_s: float) -> None:
        """Notes that a poll failed, and that the wait took `waited_s`."""
        short = waited_s < self._most_s
        self.seconds = min(self._most_s, self.seconds * 2) if short else max(_LEAST_S, self.seconds / 2)


def look(poll: Callable[[float], list[_Event]], spin: Spin, timeout_s: float) -> list[_Event]:
    """Returns what `poll(seconds)` does within `timeout_s`; polls repeatedly for a while before it sleeps."""
    events = poll(0.0)
    if events or not timeout_s:
        return events
    began = perf_counter()
    give_up = began + spin.seconds
    while perf_counter() < give_up:
        # The process that is waited for may have no other core.
        sched_yield()
        events = poll(0.0)
        if events:
            spin.met()
            return events
    events = poll(timeout_s)
    spin.slept(perf_counter() - began)
    return events
