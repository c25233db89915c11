"""A process between a link and its port: it sees every byte, and may change it, leave it out, repeat it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

__all__ = ["Alter", "Middle", "cut_frames", "frame"]

GREETING = 64
"""Bytes that either side of ZMTP says first, unencrypted."""

FIRST = 2
"""Frames of the handshake that a link sends: HELLO, INITIATE. What it encrypts comes after."""

Alter = Callable[[int, bytes, Sequence[bytes]], list[bytes]]
"""Of a frame's number, itself and what the port has said, makes the frames that go on instead; b"" ends it."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """Returns a frame of ZMTP 3."""
    if len(body) < 256:
        return bytes([flags & ~2, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def cut_frames(stream: bytearray) -> list[bytes]:
    """Takes the whole frames off the front of what has come."""
    frames = []
    while len(stream) >= 2:
        head, length = (9, int.from_bytes(stream[1:9], "big")) if stream[0] & 2 else (2, stream[1])
        if len(stream) < head + length:
            break
        frames.append(bytes(stream[: head + length]))
        del stream[: head + length]
    return frames


class Middle:
    """Stands between links and one port.

    Args:
        address: of the port.
        alter: see `Alter`; of the frames that links send.

    Attributes:
        address: where links go instead.
        seen: all frames that links have sent, as they sent them.
        over: set when the port has ended a connection.
    """

    def __init__(self, address: str, alter: Alter = lambda number, sent, heard: [sent]) -> None:
        host, _, number = address.removeprefix("tcp://").rpartition(":")
        self._to = host, int(number)
        self.alter = alter
        self.seen: list[bytes] = []
        self.over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends all connections."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            heard: list[bytes] = []
            for act in (lambda: self._forward(near, far, heard), lambda: self._back(far, near, heard)):  # noqa: B023
                thread = threading.Thread(target=act, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, near: socket.socket, far: socket.socket, heard: list[bytes]) -> None:
        """What the link says."""
        stream, greeted, number = bytearray(), 0, 0
        with suppress(OSError):
            while data := near.recv(1 << 16):
                stream += data
                greeting = stream[: GREETING - greeted]
                if greeting:
                    far.sendall(greeting)
                    del stream[: len(greeting)]
                    greeted += len(greeting)
                for sent in cut_frames(stream):
                    self.seen.append(sent)
                    for other in self.alter(number, sent, heard):
                        far.sendall(other) if other else far.shutdown(socket.SHUT_RDWR)
                    number += 1
        with suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)

    def _back(self, far: socket.socket, near: socket.socket, heard: list[bytes]) -> None:
        """What the port says."""
        stream, greeted = bytearray(), 0
        with suppress(OSError):
            while data := far.recv(1 << 16):
                near.sendall(data)
                stream += data
                skipped = min(GREETING - greeted, len(stream))
                del stream[:skipped]
                greeted += skipped
                if greeted == GREETING:
                    heard += cut_frames(stream)
        with suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
        self.over.set()
