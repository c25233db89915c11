"""What the tests of several formats share."""

from __future__ import annotations

import os
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable

import google_crc32c

__all__ = ["forked", "masked", "tfrecord"]


_LIMIT_S = 60


def masked(content: bytes) -> bytes:
    """Returns the checksum of TFRecord."""
    plain = google_crc32c.value(content)
    return struct.pack("<I", ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(records: list[bytes]) -> bytes:
    """Returns a TFRecord file."""
    pieces = []
    for record in records:
        length = struct.pack("<Q", len(record))
        pieces += [length, masked(length), record, masked(record)]
    return b"".join(pieces)


def forked(function: Callable[[], object]) -> int:
    """Returns 0 where a function ends without an error in a fork of this process, and soon."""
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads, which is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    # A process that waits for a lock for ever is ended by the system.
    signal.alarm(_LIMIT_S)
    try:
        function()
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        os._exit(1)
    os._exit(0)
