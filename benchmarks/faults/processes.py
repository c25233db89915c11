"""What this process has started, read from /proc: nothing here asks headrace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it.

    Attributes:
        pid, parent: its id and its parent's.
        state: "R", "S", "T", "Z", ...
    """

    pid: int
    parent: int
    state: str


def processes() -> dict[int, Process]:
    """Returns all processes of this machine, by id."""
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            found[int(folder.name)] = Process(int(folder.name), int(fields[1]), fields[0])
    return found


def below(pid: int) -> list[Process]:
    """Returns a process's children, their children, and so on, zombies too."""
    every = processes()
    found: list[Process] = []
    generation = [pid]
    while generation:
        children = [process for process in every.values() if process.parent in generation]
        found += children
        generation = [process.pid for process in children]
    return found


def workers() -> list[int]:
    """Returns the ids of the processes that the fork servers of this process have forked and that still run."""
    every = processes()
    fork_servers = {process.pid for process in every.values() if process.parent == os.getpid()}
    return [process.pid for process in every.values() if process.parent in fork_servers and process.state != "Z"]


def rank_of(pid: int) -> int | None:
    """Returns the rank of a worker by the name of its log; None before it has one, or when it has gone."""
    try:
        log = Path(os.readlink(PROC / str(pid) / "fd" / "1"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(log.stem.removeprefix("rank-")) if log.stem.startswith("rank-") else None


def descriptors(pid: int) -> int:
    """Returns how many files a process has open."""
    return len(list((PROC / str(pid) / "fd").iterdir()))


def shared_files() -> set[str]:
    """Returns the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))
