"""What this process may take of the machine: affinity, control groups and file systems counted in."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def cores() -> int:
    """Returns the cores that the scheduler may put this process on."""
    return len(os.sched_getaffinity(0))


def core_quota(root: Path = _ROOT) -> float | None:
    """Returns how many cores' time a control group grants; None without a limit.

    Args:
        root: where the machine's files begin.
    """
    quotas = []
    for folder in _groups(root, "cpu"):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        # Version 1 of control groups.
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            quotas.append(int(quota[0]) / int(period[0]))
    return min(quotas, default=None)


def spare_memory_bytes(root: Path = _ROOT) -> int:
    """Returns the memory that can still be taken: by the kernel's estimate, and by the control groups."""
    spare = _meminfo(root, "MemAvailable")
    for folder in _groups(root, "memory"):
        for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = _words(folder / most), _words(folder / now)
            if limit and used and limit[0] != "max":
                spare = min(spare, int(limit[0]) - int(used[0]))
    return max(0, int(spare))


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Returns the memory that there is in all."""
    return int(_meminfo(root, "MemTotal"))


def _meminfo(root: Path, name: str) -> float:
    for line in _lines(root / "proc/meminfo"):
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return math.inf if name == "MemAvailable" else 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Gives this process's control groups, from its own up to the root: each of them limits."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            top = top if top.is_dir() else root / "sys/fs/cgroup" / controller
        else:
            continue
        group = top / path.lstrip("/")
        yield group
        while group != top and top in group.parents:
            group = group.parent
            yield group


def _words(file: Path) -> list[str]:
    lines = _lines(file)
    return lines[0].split() if lines else []


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        # Files of the kernel come and go with its version and the container's mounts; absent means no limit.
        return []
