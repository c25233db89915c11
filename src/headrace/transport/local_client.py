"""A worker's transport to a server on the same host, see `local_server`, and the socket messages that both ends use."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from time import monotonic, sleep

from torch import Tensor

from headrace.shared_memory import futex
from headrace.shared_memory.descriptors import CutMessage, receive_descriptors
from headrace.shared_memory.futex import Spin, look
from headrace.shared_memory.layout import on_lines
from headrace.shared_memory.segment import SharedSegment, is_sealed, memory_file
from headrace.transport.base import LARGEST_ANSWER, LARGEST_MESSAGE, ClientTransport, Slots, TransportLayout

NOTHING = memoryview(b"")
SPIN_S = 300e-6
"""How long to spin for a message before sleeping: a push of some kB takes a fifth of it, waking up a tenth."""

_CREDENTIALS = struct.Struct("3i")


def head_bytes(parameters: Slots) -> int:
    """Returns the length of the words before the parameters: one for each shard, `version << 1 | being written`."""
    return on_lines(8 * len(parameters))


def segment_bytes(layout: TransportLayout) -> list[int]:
    """Returns the lengths of the segments that a client gives to the server."""
    return [slots.nbytes for slots in (layout.pushes, layout.replies) if slots]


def user_of(connection: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def send(connection: socket.socket, message: bytes, blob: bytes | bytearray | memoryview | int) -> None:
    """Sends a message, and a blob as a memory file, or the descriptor of one."""
    if isinstance(blob, int):
        socket.send_fds(connection, [message], [blob])
    elif blob:
        descriptor = memory_file("blob")
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(blob)
            socket.send_fds(connection, [message], [descriptor])
        finally:
            os.close(descriptor)
    else:
        connection.send(message)


def receive(connection: socket.socket, blob_bytes: int, shared: bool = False) -> tuple[bytes, memoryview]:
    """Returns a message and its blob, at most `blob_bytes`; both empty if the other end has closed.

    `shared` maps a blob that is a `SharedSegment`, and does not copy it. Raises ValueError if what was sent is too
    long, or no memory, and OSError if the connection is lost.
    """
    message, descriptors = take(connection, 1)
    return message, _blob_in(descriptors[0], blob_bytes, shared) if descriptors else NOTHING


def take(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Returns a message and at most `most` descriptors, which the caller closes; raises ValueError if more came."""
    try:
        return receive_descriptors(connection, LARGEST_MESSAGE, most)
    except CutMessage as error:
        raise ValueError("a message was too long") from error


def _blob_in(descriptor: int, most: int, shared: bool) -> memoryview:
    """Returns the content of a received file; read, not mapped, if its owner could still shorten it."""
    length = os.fstat(descriptor).st_size
    if shared and 0 < length <= most and is_sealed(descriptor):
        segment = SharedSegment.received(descriptor, length)
        segment.close()
        return segment.memory
    try:
        # Only memory files have seals: a folder could not be read, and a pipe or a slow disk could block.
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if length > most:
            raise ValueError(f"a blob of {length:,} bytes came, at most {most:,} may")
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return memoryview(file.read(length))
    finally:
        os.close(descriptor)


_STALL_S = 60.0
_WRITTEN_S = 30.0
_NAP_S = 30e-6


class LocalClientTransport(ClientTransport):
    """Shares its push slots with the server, and reads the parameters in the server's memory.

    The slots are those of the server, without pushes for a client that only pulls. The server may take `hello_s` to
    answer. Raises ConnectionError if no server listens there, or it has another layout, or does not answer.
    """

    def __init__(
        self,
        address: str,
        parameters: Slots,
        pushes: Slots,
        replies: Slots | None = None,
        *,
        rows_bytes: int = 0,
        hello_s: float = 30.0,
    ) -> None:
        self.moved_bytes = 0
        self._layout = TransportLayout(parameters, pushes, replies, rows_bytes)
        self._own = [SharedSegment.create(nbytes, "push", lasting=True) for nbytes in segment_bytes(self._layout)]
        self._regions = [segment.tensor() for segment in self._own]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(hello_s)
        head = head_bytes(parameters)
        try:
            self._shared = SharedSegment.received(self._join(address), head + parameters.nbytes, writable=False)
        except TimeoutError:
            self._free()
            raise ConnectionError(f"no link to the server at {address}: no answer for {hello_s:g} s") from None
        except (OSError, ValueError) as error:
            self._free()
            raise ConnectionError(f"no link to the server at {address}: {error}") from error
        self._words = self._shared.memory[: 8 * len(parameters)].cast("q")
        self._sources = parameters.views(self._shared.tensor(start=head))
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._spin = Spin(SPIN_S)
        self._arrived: deque[tuple[bytes, memoryview]] = deque()

    def push_slot(self, slot: int) -> Tensor:
        return self._layout.pushes.of(self._regions[0], slot)

    def joined_push_slots(self, slots: range) -> Tensor | None:
        return self._layout.pushes.joined(self._regions[0], slots)

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        self._layout.require_short(message, blob)
        self.moved_bytes += self._layout.pushes.sum(slots)
        deadline = monotonic() + _STALL_S
        while True:
            try:
                send(self._socket, message, blob)
                return
            except BlockingIOError:
                pass
            # Receives meanwhile, because two ends that only send would block each other.
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
            events = self._poll.poll(1000)
            self._poll.modify(self._socket, select.POLLIN)
            if events and events[0][1] & select.POLLIN:
                self._arrived.append(self._receive())
            if monotonic() > deadline:
                raise TimeoutError(f"the server has taken nothing for {_STALL_S:.0f} s")

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        if self._arrived:
            return self._arrived.popleft()
        arrived = look(lambda wait_s: self._poll.poll(wait_s * 1000), self._spin, timeout_s)
        return self._receive() if arrived else None

    def fetch(self, slot: int, into: Tensor) -> int:
        words, source = self._words, self._sources[slot]
        deadline = monotonic() + _WRITTEN_S
        while True:
            before: int = words[slot]
            if not before & 1:
                futex.fence()
                into.copy_(source)
                futex.fence()
                if words[slot] == before:
                    self.moved_bytes += source.numel()
                    return before >> 1
            if monotonic() > deadline:
                raise ConnectionAbortedError(f"shard {slot} has been written to for {_WRITTEN_S:.0f} s")
            if not before & 1:
                continue
            if any(events & select.POLLHUP for _, events in self._poll.poll(0)):
                # The write will never be marked as done.
                raise ConnectionResetError("the server has gone while it wrote")
            sleep(_NAP_S)

    def current_version(self, slot: int) -> int | None:
        return self._words[slot] >> 1

    def reply_slot(self, slot: int) -> Tensor:
        self.moved_bytes += self._layout.pulled.lengths[slot]
        return self._layout.pulled.of(self._regions[-1], slot)

    def close(self) -> None:
        self._free()
        self._shared.close()

    def _join(self, address: str) -> int:
        """Sends the hello; returns the descriptor of the parameters' memory."""
        self._socket.connect("\0" + address.removeprefix("local:"))
        if user_of(self._socket) != os.getuid():
            raise ConnectionError("it belongs to another user")
        socket.send_fds(self._socket, [self._layout.hello()], [segment.descriptor for segment in self._own])
        answer, descriptors = take(self._socket, 1)
        if answer != b"\0" or not descriptors:
            raise ConnectionError(answer[1:].decode(errors="replace") or "it has gone")
        return descriptors[0]

    def _receive(self) -> tuple[bytes, memoryview]:
        message, blob = receive(self._socket, LARGEST_ANSWER, shared=True)
        if not message:
            raise ConnectionResetError("the server has gone")
        return message, blob

    def _free(self) -> None:
        self._socket.close()
        for segment in self._own:
            segment.close()
