"""Wall clocks of hosts that can be set from outside, by a library that every process of a command loads."""

from __future__ import annotations

import random
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from wall_clock import make

__all__ = ["HOST", "Clocks"]

HOST = "STORM_HOST"
"""The variable that tells a process on which of several hosts it is."""

SHORTEST_S, LONGEST_S = 60, 3600
"""Of a jump, forward or back."""

MOVED = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

static const volatile long *offset;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("STORM_CLOCKS"), *host = getenv("STORM_HOST");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = (const volatile long *)page + (host ? atoi(host) : 0);
    close(file);
}

static long moved_s(void) { return offset ? *offset : 0; }
"""


@cache
def _library() -> tuple[str, TemporaryDirectory[str]]:
    """Returns the compiled library, and the folder that lasts as long as this process."""
    folder = TemporaryDirectory(prefix="headrace-storm-clock-")
    return make(Path(folder.name), MOVED), folder


class Clocks:
    """The wall clock of each of some hosts; no process of theirs sees another one."""

    def __init__(self, path: Path, hosts: int) -> None:
        self._path, self._hosts = path, hosts
        path.write_bytes(bytes(8 * hosts))

    def environment(self) -> dict[str, str]:
        """Returns what makes a process and its children see them."""
        return {"LD_PRELOAD": _library()[0], "STORM_CLOCKS": str(self._path)}

    def jump(self, pick: int) -> int:
        """Sets the clock of one host forward or back; returns the host."""
        chance, host = random.Random(pick), pick % self._hosts
        jump_s = chance.choice((-1, 1)) * chance.randint(SHORTEST_S, LONGEST_S)
        with self._path.open("r+b", buffering=0) as file:
            file.seek(8 * host)
            file.write(struct.pack("q", jump_s))
        return host
