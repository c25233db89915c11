"""Attacks by a process that can reach a port and holds no secret: frames of others, changed or not, and noise."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from time import monotonic

from headrace.transport.remote_server import RemoteServerTransport
from transport.middle import frame

__all__ = ["STRANGERS", "Strangers", "greeting"]

STRANGERS = ("a link of this run again", "a link of another run", "forged", "truncated", "noise", "not encrypted")
AT_ONCE = 32
_DEADLINE_S = 30.0


def greeting(mechanism: bytes = b"CURVE") -> bytes:
    """Returns what a link says first (ZMTP 3.1, section 3)."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\3\1" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


class Strangers:
    """Args:
    port: that is attacked.
    recorded: the frames of a genuine link of this run, from its HELLO on.
    strange: of a link of another run.
    rng: decides.
    """

    def __init__(
        self, port: RemoteServerTransport, recorded: Sequence[bytes], strange: Sequence[bytes], rng: random.Random
    ):
        self._port = port
        self._recorded, self._strange = list(recorded), list(strange)
        self._rng = rng
        host, _, number = port.address.removeprefix("tcp://").rpartition(":")
        self._to = host, int(number)

    def attack(self, kind: str, count: int = AT_ONCE) -> list[bytes]:
        """Connects so many times, and returns what the port has heard: nothing, as it should be."""
        made = [self._call(self._stream(kind)) for _ in range(count)]
        heard = [mail.message for mail in self._port.receive(0.0)]
        deadline = monotonic() + _DEADLINE_S
        for each in made:
            while not _ended(each):
                heard += [mail.message for mail in self._port.receive(0.001)]
                assert monotonic() < deadline, f"the port has not ended a connection of {kind}"
            each.close()
        return heard + [mail.message for mail in self._port.receive(0.0)]

    def _call(self, stream: bytes) -> socket.socket:
        made = socket.create_connection(self._to)
        made.setblocking(False)
        try:
            made.send(stream)
            # A reader that still waits for more is told that none comes.
            made.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was ended already
        return made

    def _stream(self, kind: str) -> bytes:
        rng = self._rng
        if kind == "a link of this run again":
            return greeting() + b"".join(self._recorded)
        if kind == "a link of another run":
            return greeting() + b"".join(self._strange)
        if kind == "not encrypted":
            ready = frame(b"\5READY\x0bSocket-Type\0\0\0\6DEALER", 4)
            return greeting(b"NULL") + ready + b"".join(frame(rng.randbytes(40), 1) for _ in range(3))
        if kind == "noise":
            return greeting() + b"".join(frame(rng.randbytes(rng.randrange(400)), rng.randrange(8)) for _ in range(3))
        frames = list(self._recorded)
        target = rng.randrange(2)
        if kind == "truncated":
            frames[target] = frames[target][: rng.randrange(1, len(frames[target]))]
        else:
            changed = bytearray(frames[target])
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            frames[target] = bytes(changed)
        return greeting() + b"".join(frames)


def _ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 12):
            continue
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True
