"""A library that, loaded before all others, moves the wall clock of a process: for every reading, in every library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["COMPILER", "make"]

COMPILER = shutil.which("cc") or shutil.which("gcc")
"""None where there is none: no clock can be moved."""

READINGS = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long moved_s(void);

int clock_gettime(clockid_t clock, struct timespec *at) {
    int code = syscall(SYS_clock_gettime, clock, at);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += moved_s();
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


def make(folder: Path, moved: str) -> str:
    """Compiles the library; returns its path, for LD_PRELOAD.

    Args:
        folder: for the library.
        moved: C that defines `static long moved_s(void)`, by how much the clock is moved at a reading.
    """
    assert COMPILER is not None, "a clock needs a C compiler"
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(READINGS + moved)
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)
