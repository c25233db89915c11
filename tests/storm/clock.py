"""Wall clocks of hosts that can be set from outside, by a library that every process of a command loads."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["COMPILER", "HOST", "Clocks"]

COMPILER = shutil.which("cc") or shutil.which("gcc")
"""None where there is none: no clock jumps."""

HOST = "STORM_HOST"
"""The variable that tells a process on which of several hosts it is."""

SHORTEST_S, LONGEST_S = 60, 3600
"""Of a jump, forward or back."""

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("STORM_CLOCKS"), *host = getenv("STORM_HOST");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = (const volatile long *)page + (host ? atoi(host) : 0);
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int code = syscall(SYS_clock_gettime, clock, at);
    if (!code && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset;
    return code;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


@cache
def _library() -> tuple[str, TemporaryDirectory[str]]:
    """Returns the compiled library, and the folder that lasts as long as this process."""
    assert COMPILER is not None, "a clock needs a C compiler"
    folder = TemporaryDirectory(prefix="headrace-storm-clock-")
    source, library = Path(folder.name) / "clock.c", Path(folder.name) / "clock.so"
    source.write_text(SOURCE)
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library), folder


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
