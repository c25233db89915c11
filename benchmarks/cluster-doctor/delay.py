"""A link between two hosts of `scripts/hosts` whose packets arrive later: a process holds each for so long.

The kernel's own delay, netem, is missing on some machines. In both hosts the link is the device "delay".
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import queue
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

ADDRESSES = ("10.98.0.1", "10.98.0.2")
_DEVICE = b"delay"
_SET_DEVICE = 0x400454CA
"""TUNSETIFF of linux/if_tun.h."""
_TUN, _NO_HEADER = 0x0001, 0x1000
_NEW_NETWORK = 0x40000000
_PACKET_BYTES = 1 << 16


@contextlib.contextmanager
def delayed_link(hosts: tuple[str, str], seconds: float) -> Iterator[None]:
    """Links two network namespaces, with so many seconds in each direction."""
    ends = [_open(host) for host in hosts]
    for host, own, other in zip(hosts, ADDRESSES, reversed(ADDRESSES), strict=True):
        subprocess.run(["ip", "-n", host, "address", "add", own, "peer", other, "dev", _DEVICE], check=True)
        subprocess.run(["ip", "-n", host, "link", "set", _DEVICE, "up"], check=True)
    ways = [(ends[0], ends[1]), (ends[1], ends[0])]
    for way in ways:
        held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=_take, args=(way[0], seconds, held), daemon=True).start()
        threading.Thread(target=_give, args=(way[1], held), daemon=True).start()
    try:
        yield
    finally:
        # The device goes with the last descriptor, which threads that wait for packets hold; so it is deleted.
        for host in hosts:
            subprocess.run(["ip", "-n", host, "link", "delete", _DEVICE], check=True)


def _open(host: str) -> int:
    """Makes the device in a network namespace; returns its descriptor."""
    opened: list[int] = []

    def enter() -> None:
        # A namespace belongs to a thread.
        with open(f"/run/netns/{host}") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {host}")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", _DEVICE, _TUN | _NO_HEADER))
        opened.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return opened[0]


def _take(device: int, seconds: float, held: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):  # the device was deleted
        while True:
            packet = os.read(device, _PACKET_BYTES)
            held.put((time.monotonic() + seconds, packet))


def _give(device: int, held: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):  # the device was deleted
        while True:
            due, packet = held.get()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(device, packet)
