"""Descriptors that come over a socket."""

from __future__ import annotations

import os
import socket
from array import array

_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)


class CutMessage(Exception):
    """A message was too long, or this process could not open what came with it."""


def receive_descriptors(connection: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Returns a message and its descriptors, which no program inherits that this process starts.

    Not `socket.recv_fds`, which ignores the flag for that.

    Args:
        connection: a Unix domain socket.
        nbytes: the longest message.
        most: the most descriptors; the caller closes them.

    Raises:
        CutMessage: the system has dropped a part of it: too many bytes or descriptors, or none can be opened here.
    """
    message, ancillary, flags, _ = connection.recvmsg(nbytes, socket.CMSG_LEN(4 * most), _CLOEXEC)
    descriptors = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) // descriptors.itemsize * descriptors.itemsize])
    if flags & _CUT:
        for descriptor in descriptors:
            os.close(descriptor)
        raise CutMessage
    return message, list(descriptors)
