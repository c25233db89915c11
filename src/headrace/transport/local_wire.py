"""What both ends of a link on one host do with its socket: messages that carry descriptors of memory."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from array import array

from headrace.shared_memory.segment import SharedSegment, is_sealed, memory_file
from headrace.transport.base import LARGEST_MESSAGE, Slots, TransportLayout

NOTHING = memoryview(b"")
SPIN_S = 300e-6
"""How long to look for a message before one sleeps: a push of some kB takes a fifth of it, to be woken a tenth."""

_CREDENTIALS = struct.Struct("3i")
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_ROOM = [socket.CMSG_LEN(4 * most) for most in range(3)]


def head_bytes(parameters: Slots) -> int:
    """Returns the length of the words before the parameters: one a shard, `version << 1 | being written`."""
    return -(-8 * len(parameters) // 64) * 64


def segment_bytes(layout: TransportLayout) -> list[int]:
    """Returns the lengths of the pieces of memory that a link gives to the port."""
    return [slots.nbytes for slots in (layout.pushes, layout.replies) if slots]


def user_of(connection: socket.socket) -> int:
    """Returns who has made the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def send(connection: socket.socket, message: bytes, blob: bytes | bytearray | memoryview | int) -> None:
    """Sends a message, and a blob as a file of its own; it may be the descriptor of one."""
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
    """Returns a message and its blob; both empty if the other end has gone.

    Args:
        connection: to the other end.
        blob_bytes: the longest blob that may come.
        shared: whether to take a blob that is a `SharedSegment` as the shared memory that it is.

    Raises:
        ValueError: it sends what is too long, or something else than memory.
        OSError: the connection is lost.
    """
    message, descriptors = take(connection, 1)
    return message, _blob_in(descriptors[0], blob_bytes, shared) if descriptors else NOTHING


def take(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Returns a message and at most so many descriptors, which are the caller's to close.

    Raises:
        ValueError: there were more, or it is too long.
    """
    message, ancillary, flags, _ = connection.recvmsg(LARGEST_MESSAGE, _ROOM[most], _CLOEXEC)
    descriptors = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) // descriptors.itemsize * descriptors.itemsize])
    if flags & _CUT:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError("a message was too long")
    return message, list(descriptors)


def _blob_in(descriptor: int, most: int, shared: bool) -> memoryview:
    """Returns what lies in the file that was sent. Read, not mapped, where its owner may still shorten it."""
    length = os.fstat(descriptor).st_size
    if shared and 0 < length <= most and is_sealed(descriptor):
        segment = SharedSegment.received(descriptor, length)
        segment.close()
        return segment.memory
    try:
        # Which only memory has: a folder could not be read, a pipe or a file of a slow disk could be waited for.
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if length > most:
            raise ValueError(f"a blob of {length:,} bytes came, at most {most:,} may")
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return memoryview(file.read(length))
    finally:
        os.close(descriptor)
