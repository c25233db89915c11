"""So many new connections a second come to a listening socket; the system leaves the others outside.

A stranger's connection costs its keys and its end, a third of a millisecond of processor time, so that many of them
take a core from whoever works. While too many come, a filter on the socket (classic BPF; McCanne, Jacobson, "The BSD
packet filter", 1993) drops the packets that open one; whoever is in notices nothing. TCP itself knocks again, after a
second.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from time import monotonic

_ATTACH, _DETACH = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux."""

_LOAD_BYTE, _AND, _IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_FLAGS_AT = 13
_SYN, _ACK = 0x02, 0x10
_DROP_SYN = (
    # A socket that listens sees a packet from its TCP header on.
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_AND, 0, 0, _SYN | _ACK),
    (_IF_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)


class AcceptLimiter:
    """Belongs to one thread.

    Args:
        descriptor: of a socket that listens.
        a_second: connections that may come.
        at_once: that may come at a time.

    Attributes:
        closed: whether nobody is let in now.
    """

    def __init__(self, descriptor: int, a_second: float, at_once: float) -> None:
        self.closed = False
        self._descriptor = descriptor
        self._a_second = a_second
        self._at_once = at_once
        self._left = at_once
        self._looked = monotonic()

    def came(self) -> None:
        """Is told of a connection that has come."""
        self._left -= 1

    def look(self) -> None:
        """Opens or closes; to be called now and then, and soon after connections have come."""
        now = monotonic()
        self._left = min(self._at_once, self._left + (now - self._looked) * self._a_second)
        self._looked = now
        if self._left < 0 and not self.closed:
            self._set(True)
        elif self._left >= self._at_once / 4 and self.closed:
            self._set(False)

    def _set(self, closed: bool) -> None:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self._descriptor)
        try:
            if closed:
                program = b"".join(struct.pack("HBBI", *each) for each in _DROP_SYN)
                place = ctypes.create_string_buffer(program)
                listening.setsockopt(
                    socket.SOL_SOCKET, _ATTACH, struct.pack("HL", len(_DROP_SYN), ctypes.addressof(place))
                )
            else:
                listening.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            self.closed = closed
        finally:
            # It stays in the hands of whoever listens.
            listening.detach()
