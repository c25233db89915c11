"""From one process to another on another host: ZeroMQ over TCP, encrypted, which sends and receives while both compute.

    Outbox ─► at most `slots` messages ─► a thread of ZeroMQ ══ TCP ══► a thread of ZeroMQ ─► at most `slots` ─► Inbox

The receiver makes a pair of keys for the connection, and sends the public one to the run's processes alone: a stranger
fails in the handshake. When the connection is established, no further one is accepted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

import torch
import zmq
from torch import Tensor

from headrace.channels.mailbox import Inbox, Outbox, places
from headrace.transport.connections import AcceptLimiter
from headrace.transport.frames import PART_BYTES
from headrace.transport.zeromq import connect, listen, make_socket, news, watch

T = TypeVar("T")

Check = Callable[[Callable[[], bool], str], None]

_SLICE_MS = 50
_MEET_S = 30.0
_COUNT = struct.Struct("<I")
_HELLO = b""
_ENDS = {
    zmq.EVENT_CLOSED: "no process listens there",
    zmq.EVENT_CONNECT_RETRIED: "no process listens there",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not let this process in",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the process that listens there is not of this run",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the process that listens there is not of this run",
    zmq.EVENT_DISCONNECTED: "the connection was closed",
}


class _Connection:
    """One end of a connection; `sort` is `zmq.PUSH` or `zmq.PULL`.

    `check` is called about every 50 ms of waiting, with what tells whether the other end has come after all, and how
    the connection has ended, "" while it stands; it raises where no process will come, and always after an end.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sort: int, slots: int, events: int, check: Check
    ) -> None:
        self.socket = make_socket(context, sort)
        self.socket.sndhwm = self.socket.rcvhwm = slots
        # The engine watches whether the other end lives: one that a debugger stops is not gone.
        self.socket.heartbeat_ivl = 0
        self._check = check
        self.monitor = watch(self.socket, events)
        self._poll = zmq.Poller()
        self._poll.register(self.socket, zmq.POLLIN if sort == zmq.PULL else zmq.POLLOUT)
        self._poll.register(self.monitor, zmq.POLLIN)

    def until(self, act: Callable[[], T], ended: Callable[[], str]) -> T:
        """Returns what `act` does, as soon as the socket lets it."""
        while True:
            # Asked first, because what came before the end is read after it.
            end = ended()
            try:
                return act()
            except zmq.Again:
                pass
            if end or not self._poll.poll(_SLICE_MS):
                self.check(end)

    def wait(self) -> None:
        """Waits for about 50 ms, or until something has happened to the connection."""
        if not self.monitor.poll(_SLICE_MS):
            self.check()

    def check(self, end: str = "") -> None:
        """Looks whether the other end will come; raises where the connection has ended."""
        self._check(lambda: False, end)

    def close(self) -> None:
        """Ends the connection; what has not left yet does not any more."""
        self.socket.disable_monitor()
        self.socket.close(0)
        self.monitor.close(0)


class RemoteSender(Outbox):
    """The end that sends."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], slots: int, check: Check, address: str, key: bytes
    ) -> None:
        self.moved_bytes = 0
        self._address = address
        self._established = False
        self._end = ""
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(event.value for event in _ENDS)
        # With the greeting.
        self._connection = _Connection(context, zmq.PUSH, slots + 1, events, check)
        socket = self._connection.socket
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = key
        connect(socket, address)
        socket.send(_HELLO)

    def meet(self) -> None:
        """Waits until the connection is established."""
        give_up = monotonic() + _MEET_S
        while not self._established:
            self._connection.wait()
            end = self._ended()
            if not self._established and monotonic() > give_up:
                end = f"no answer for {_MEET_S:.0f} s"
            if end:
                self._connection.check(f"{self._address} cannot be reached: {end}")

    def send(self, note: bytes, tensors: Sequence[Tensor]) -> None:
        contents = [_bytes(tensor) for tensor in tensors]
        sizes = [len(note), *map(len, contents)]
        parts: list[bytes | memoryview] = [_COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}q", *sizes)]
        for content in (memoryview(note), *contents):
            parts += [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]
        # ZeroMQ copies it, so that the tensors may change meanwhile.
        self._connection.until(lambda: self._connection.socket.send_multipart(parts, zmq.NOBLOCK), self._ended)
        self.moved_bytes += places(sizes)[1]

    def close(self) -> None:
        self._connection.close()

    def _ended(self) -> str:
        for event, _ in news(self._connection.monitor):
            self._established |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._end = self._end or _ENDS.get(event, "")
        return self._end


class RemoteReceiver(Inbox):
    """The end that receives."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], slots: int, check: Check, host: str) -> None:
        self.moved_bytes = 0
        self._connection = _Connection(context, zmq.PULL, slots, zmq.EVENT_LISTENING | zmq.EVENT_DISCONNECTED, check)
        self._gate: AcceptLimiter | None = None
        self._peer = -1
        self._gone: set[int] = set()
        socket = self._connection.socket
        self.key, secret = zmq.curve_keypair()
        socket.curve_server, socket.curve_secretkey, socket.curve_publickey = True, secret, self.key
        self.address = listen(socket, f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")

    def meet(self) -> None:
        """Waits for the other end's greeting, and accepts no other connection."""
        give_up = monotonic() + _MEET_S

        def late() -> str:
            waited = monotonic() > give_up
            return f"it has not connected to {self.address} within {_MEET_S:.0f} s" if waited else ""

        frame = self._connection.until(lambda: self._connection.socket.recv(zmq.NOBLOCK, copy=False), late)
        self._peer = int(frame.get(zmq.SRCFD))
        self._ended()
        if self._gate:
            # Not unbound, which would end the connection, too.
            self._gate.count()
            self._gate.update()

    def receive(self, read: Callable[[bytes, Tensor], T]) -> T:
        frames = self._connection.until(self._next, self._ended)
        try:
            note, data, end = _assemble([frame.buffer for frame in frames])
        except (ValueError, struct.error) as error:
            self._connection.check(f"it sent what is no message: {error}")
            raise
        self.moved_bytes += end
        return read(note, data)

    def close(self) -> None:
        self._connection.close()

    def _next(self) -> list[zmq.Frame]:
        while True:
            frames = self._connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if int(frames[0].get(zmq.SRCFD)) == self._peer:
                return frames

    def _ended(self) -> str:
        for event, descriptor in news(self._connection.monitor):
            if event == zmq.EVENT_LISTENING:
                self._gate = AcceptLimiter(descriptor, a_second=0, at_once=0)
            else:
                # Connections of strangers end, too.
                self._gone.add(descriptor)
        return "the connection was closed" if self._peer in self._gone else ""


def _bytes(tensor: Tensor) -> memoryview:
    """Returns a tensor's bytes."""
    dense = tensor.contiguous().cpu()
    # One element may lie as if others lay between.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def _assemble(frames: Sequence[memoryview]) -> tuple[bytes, Tensor, int]:
    """Returns a message's note, its tensors' bytes, each at the next multiple of 64, and how many bytes it has.

    Raises ValueError or struct.error if the frames are no message.
    """
    (count,) = _COUNT.unpack_from(frames[0])
    sizes = struct.unpack_from(f"<{count}q", frames[0], _COUNT.size)
    if not sizes or min(sizes) < 0 or sum(sizes) != sum(map(len, frames[1:])):
        raise ValueError(f"{sum(map(len, frames[1:])):,} bytes where {sum(sizes):,} are announced")
    begins, end = places(sizes)
    content = torch.empty(end, dtype=torch.uint8)
    memory = content.numpy().data
    rest = iter(frames[1:])
    for at, size in zip(begins, sizes, strict=True):
        stop = at + size
        while at < stop:
            part = next(rest, b"")
            if not 0 < len(part) <= stop - at:
                raise ValueError(f"a part of {len(part):,} bytes where {stop - at:,} are left")
            memory[at : at + len(part)] = part
            at += len(part)
    return bytes(memory[: sizes[0]]), content[places([sizes[0], 0])[0][1] :], end
