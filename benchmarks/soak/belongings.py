"""What the processes of a run hold, and what it leaves in files; read from /proc, so that the run is not asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from processes import PROC, below, rank_of

Figures = dict[str, float]
"""Name to a number; "role: what" for that of a role's largest process."""

GONE = (FileNotFoundError, ProcessLookupError, PermissionError, KeyError)
"""A process ended while it was looked at: some files of a zombie may not be read, others lack most lines."""


@dataclass(frozen=True)
class Roles:
    """Which ranks are what: workers first, then servers, their backups, and workers that have joined."""

    workers: int
    servers: int

    def of(self, rank: int) -> str:
        """Returns the role of a rank."""
        if rank < self.workers or rank >= self.workers + 2 * self.servers:
            return "worker"
        return "server" if rank < self.workers + self.servers else "backup"


def process_figures(launcher: int, roles: Roles) -> Figures:
    """Returns the figures of each role's largest process, and those of all processes together."""
    found: Figures = {"processes": 0, "zombies": 0, "all: own memory, MB": 0.0}
    for pid, role in _roles(launcher, roles):
        try:
            figures = _of_process(pid)
        except GONE:
            continue
        found["processes"] += 1
        found["all: own memory, MB"] += figures.pop("own, MB")
        for what, value in figures.items():
            name = f"{role}: {what}"
            found[name] = max(found.get(name, 0.0), value)
    found["zombies"] = sum(process.state == "Z" for process in below(launcher))
    return found


def ranks(launcher: int) -> dict[int, int]:
    """Returns the process of each rank that runs: a fork server's child whose output goes to the rank's log."""
    processes, found = below(launcher), {}
    fork_servers = {process.pid for process in processes if process.parent == launcher}
    for process in processes:
        rank = rank_of(process.pid) if process.parent in fork_servers and process.state != "Z" else None
        if rank is not None:
            found[rank] = process.pid
    return found


def file_figures(launcher: int, run_dir: Path, temporary: Path) -> Figures:
    """Returns the figures of the run's directory, of its folder for temporary files, and of its /dev/shm."""
    files = dict(_files(run_dir))
    events = [size for path, size in files.items() if path.parent.name == "events"]
    logs = [size for path, size in files.items() if path.parent.name == "logs"]
    other = sum(files.values()) - sum(events) - sum(logs)
    return {
        "files of the run": len(files),
        "events, MB": sum(events) / 1e6,
        "logs, kB": sum(logs) / 1e3,
        "other files, MB": other / 1e6,
        "temporary files": sum(1 for _ in _files(temporary)),
        # As the run sees it: it may have one of its own.
        "in /dev/shm": len(os.listdir(PROC / str(launcher) / "root/dev/shm")),
    }


def _roles(launcher: int, roles: Roles) -> Iterator[tuple[int, str]]:
    yield launcher, "launcher"
    of_ranks = {pid: roles.of(rank) for rank, pid in ranks(launcher).items()}
    for process in below(launcher):
        if process.state != "Z":
            yield process.pid, of_ranks.get(process.pid, "fork server" if process.parent == launcher else "other")


def _of_process(pid: int) -> Figures:
    folder = PROC / str(pid)
    status = _numbers(folder / "status")
    maps = (folder / "maps").read_text().splitlines()
    shares = _numbers(folder / "smaps_rollup")
    return {
        "RSS, MB": status["VmRSS"] / 1e3,
        "highest RSS, MB": status["VmHWM"] / 1e3,
        # Its part of what the processes of the run share; the pages of libraries are shared with other programs, too.
        "own, MB": (shares["Pss_Anon"] + shares["Pss_Shmem"]) / 1e3,
        "descriptors": len(os.listdir(folder / "fd")),
        "threads": status["Threads"],
        "mapped segments": len({line.split()[4] for line in maps if "/memfd:headrace" in line}),
        "mappings": len(maps),
    }


def _numbers(path: Path) -> Mapping[str, float]:
    """Returns the first number behind each name."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0].rstrip(":"): float(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path, path.stat().st_size
        except FileNotFoundError:
            continue  # deleted meanwhile
