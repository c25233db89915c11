"""A worker's transport to a server on another host; see `remote_server`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic

import torch
import zmq
from torch import Tensor

from headrace.transport import frames
from headrace.transport.base import LARGEST_ANSWER, ClientTransport, Slots, TransportLayout
from headrace.transport.frames import FrameKind, Payload, Reassembler
from headrace.transport.zeromq import ENDS, Keys, connect, make_client

_STALL_S = 60.0
_FAREWELL_MS = 2_000
"""How long the last messages may take."""


class RemoteClientTransport(ClientTransport):
    """The client's end; it belongs to one thread.

    `address` is "tcp://host:port", `secret` the run's. The slots are those of the server, without pushes for a client
    that only pulls. The server may take `hello_s` to answer. Raises ConnectionError if no server listens there, or it
    is of another run or has another layout, and UsageError if the secret is too short, or this is no address.
    """

    window = 2

    def __init__(
        self,
        address: str,
        parameters: Slots,
        pushes: Slots,
        replies: Slots | None = None,
        *,
        secret: bytes,
        rows_bytes: int = 0,
        hello_s: float = 30.0,
    ) -> None:
        self.moved_bytes = 0
        self._address = address
        self._layout = TransportLayout(parameters, pushes, replies, rows_bytes)
        self._region = torch.zeros(pushes.nbytes, dtype=torch.uint8)
        self._content = self._region.numpy().data
        self._reassembler = Reassembler(self._layout.pulled.lengths, LARGEST_ANSWER)
        self._arrived: deque[Payload] = deque()
        self._pulled: dict[int, tuple[int, Tensor]] = {}
        self._versions = [-1] * len(parameters)
        self._sent, self._heard = 0, 0
        self._welcome = False
        self._end = ""
        keys = Keys(secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._events = make_client(self._context, keys)
        self._poll = zmq.Poller()
        self._poll.register(self._events.socket, zmq.POLLIN)
        try:
            connect(self._socket, address)
            self._put(frames.control_frame(FrameKind.HELLO, self._layout.hello()))
            self._await_welcome(hello_s)
        except BaseException:
            self._free(0)
            raise

    def push_slot(self, slot: int) -> Tensor:
        return self._layout.pushes.of(self._region, slot)

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        self._layout.require_short(message, blob)
        pushes = self._layout.pushes
        lengths = [(slot, pushes.lengths[slot]) for slot in slots]
        for parts in frames.to_frames(message, lengths, lambda slot: (0, pushes.of(self._content, slot)), blob):
            self._put(parts)
        self.moved_bytes += pushes.sum(slots)

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        deadline = monotonic() + timeout_s
        while not self._arrived:
            self._read()
            if self._arrived:
                break
            if self._end:
                raise ConnectionResetError(f"the server at {self._address} is lost: {self._end}")
            left = deadline - monotonic()
            if left <= 0:
                return None
            self._wait(left, zmq.POLLIN)
        payload = self._arrived.popleft()
        self._pulled.update(payload.slots)
        return payload.message, payload.blob

    def fetch(self, slot: int, into: Tensor) -> int:
        if self._layout.replies is None and slot in self._pulled:
            self._versions[slot], content = self._pulled.pop(slot)
            into.copy_(content)
        return self._versions[slot]

    def reply_slot(self, slot: int) -> Tensor:
        return self._pulled[slot][1]

    def close(self) -> None:
        self._free(0 if self._end else _FAREWELL_MS)

    def _free(self, linger_ms: int) -> None:
        if not self._context.closed:
            self._events.close(linger_ms)
            self._context.term()

    def _await_welcome(self, hello_s: float) -> None:
        began = monotonic()
        deadline = began + hello_s
        self._read()
        while not self._welcome:
            now = monotonic()
            # A server may be busy, and its host's kernel is not.
            until = deadline if self._events.connected else began + hello_s / 2
            if self._end or now >= until:
                raise ConnectionRefusedError(
                    f"no link to the server at {self._address}: {self._end or f'no answer for {now - began:.2g} s'}"
                )
            self._wait(until - now, zmq.POLLIN)
            self._read()

    def _put(self, parts: frames.Frame) -> None:
        """Sends a frame; receives while there is no room, because two ends that only send would block each other."""
        deadline = monotonic() + _STALL_S
        while True:
            if self._end:
                raise ConnectionResetError(f"the server at {self._address} is lost: {self._end}")
            try:
                self._socket.send_multipart(frames.numbered(parts, self._sent), zmq.NOBLOCK)
                self._sent += 1
                return
            except zmq.Again:
                self._read()
            left = deadline - monotonic()
            if left <= 0:
                raise TimeoutError(f"the server at {self._address} has taken nothing for {_STALL_S:.0f} s")
            self._wait(left, zmq.POLLIN | zmq.POLLOUT)

    def _wait(self, timeout_s: float, events: int) -> None:
        self._poll.register(self._socket, events)
        self._poll.poll(max(1, int(timeout_s * 1000)))

    def _read(self) -> None:
        """Receives all that has arrived; first checks whether the connection has ended, as earlier frames count."""
        for event, _ in self._events.read():
            self._end = self._end or ENDS.get(event, "")
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._open([part.buffer for part in parts])
            except ValueError as error:
                self._end = self._end or f"it sends what no server sends: {error}"

    def _open(self, parts: Sequence[memoryview]) -> None:
        kind = frames.kind_of(parts)
        frames.expect_number(parts, self._heard)
        self._heard += 1
        if kind == FrameKind.WELCOME:
            self._welcome = True
        elif kind == FrameKind.FAREWELL:
            self._end = self._end or bytes(parts[1]).decode(errors="replace") or "it has ended the link"
        else:
            payload = self._reassembler.add(parts)
            if payload is not None:
                self._arrived.append(payload)
                self.moved_bytes += self._layout.pulled.sum([*payload.slots])
