"""What processors and memory this machine has, what of them this process may use, and what it uses."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError
from headrace.machine import disk

HOST_CORES = "HEADRACE_HOST_CORES"
"""Names the cores of this host that the run has, where its launcher has divided them among the processes."""

_ROOT = Path("/")
"""Where the machine's files begin; tests have roots of their own."""


def cores() -> int:
    """Returns how many processor cores the processes of this run may use here.

    Their affinity and their control groups' quota limit it.
    """
    count, quota = _given_cores() or len(os.sched_getaffinity(0)), core_quota()
    return count if quota is None else min(count, max(1, round(quota)))


def most_threads() -> int:
    """Returns how many threads each process may have, as OMP_NUM_THREADS says; 0 where it says nothing."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    # torchrun sets it to 1 in every process, whatever there is.
    return int(threads) if threads.isdecimal() and "RANK" not in os.environ else 0


def _given_cores() -> int:
    given = os.environ.get(HOST_CORES, "0")
    if not given.isdecimal():
        raise UsageError(f"{HOST_CORES} is the number of cores that this process's run has here, got {given!r:.60}")
    return int(given)


def core_quota(root: Path = _ROOT) -> float | None:
    """Returns how many cores' time the control groups grant, nested and version 1 ones too; None if unlimited."""
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
    """Returns the memory that this process can still take, by the kernel's estimate and by the control groups.

    Shared memory counts in a control group, too: a process that exceeds its limit is killed.
    """
    spare = _meminfo(root, "MemAvailable")
    for folder in _groups(root, "memory"):
        for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = _words(folder / most), _words(folder / now)
            if limit and used and limit[0] != "max":
                spare = min(spare, int(limit[0]) - int(used[0]) + _page_cache_bytes(folder))
    return max(0, spare)


def _page_cache_bytes(group: Path) -> int:
    """Returns how much of a control group's memory caches files; the kernel frees it before the limit is exceeded."""
    counts = dict(line.split() for line in _lines(group / "memory.stat"))
    return sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in ("active_file", "inactive_file"))


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Returns the memory that there is in all."""
    return _meminfo(root, "MemTotal")


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds since the machine began, of all cores together: computed, and given to other machines."""

    busy_s: float
    stolen_s: float
    total_s: float
    cores: int


def processor_times(root: Path = _ROOT) -> ProcessorTimes | None:
    """Returns what the machine's processors did so far; None where the kernel does not say."""
    lines = _lines(root / "proc/stat")
    counts = [int(word) for word in (lines[0].split()[1:9] if lines else [])]
    if len(counts) < 8 or not lines[0].startswith("cpu "):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, idle, disk, interrupts, soft, stolen = (count / tick for count in counts)
    busy = user + nice + system + interrupts + soft
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return ProcessorTimes(busy, stolen, busy + stolen + idle + disk, cores)


def own_processor_s(root: Path = _ROOT) -> float:
    """Returns the seconds of processor time that this process and all that it has started took, ended ones too."""
    parents: dict[int, int] = {}
    took: dict[int, float] = {}
    for folder in (root / "proc").glob("[0-9]*"):
        # After the name, which may contain anything but is in brackets.
        words = " ".join(_lines(folder / "stat")).rpartition(")")[2].split()
        if len(words) > 14:
            parents[int(folder.name)] = int(words[1])
            took[int(folder.name)] = sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    family, added = {os.getpid()}, {os.getpid()}
    while added:
        added = {process for process, parent in parents.items() if parent in added} - family
        family |= added
    return sum(took.get(process, 0.0) for process in family)


def load_average(root: Path = _ROOT) -> float | None:
    """Returns how many processes ran or waited to run in the last minute, on average; None if unknown."""
    words = _words(root / "proc/loadavg")
    return float(words[0]) if words else None


def processor_name(root: Path = _ROOT) -> str:
    """Returns the processor's name, or that of its architecture where the kernel does not say."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def resident_bytes() -> int:
    """Returns how much of this process's memory is in the machine's memory."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")


def peak_resident_bytes() -> int:
    """Returns the most memory that this program has had in the machine's memory.

    Not `ru_maxrss`, which counts the program that was in this process before, where a launcher has started it.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def _meminfo(root: Path, name: str) -> int:
    for line in _lines(root / "proc/meminfo"):
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields this process's control groups, from its own up to the root: each of them limits."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            top = top if disk.is_folder(top) else root / "sys/fs/cgroup" / controller
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
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        # Files of the kernel come and go with its version and the container's mounts; absent means no limit.
        return []
