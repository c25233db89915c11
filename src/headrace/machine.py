"""What this machine has, what of it this process may use, and what the C library does with free memory."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from headrace.devices import choose, choose_each, one_each
from headrace.errors import UnfitMachine
from headrace.spec.cluster import Cluster, Host

HOST_CORES = "HEADRACE_HOST_CORES"
"""Names the cores of this host that the run has, where its launcher has divided them among the processes."""

_ROOT = Path("/")
"""Where the machine's files begin; tests have roots of their own."""


def cores() -> int:
    """Returns how many processor cores the processes of this run may use here.

    Their affinity, their control groups' quota and OMP_NUM_THREADS limit it.
    """
    limits = [int(os.environ.get(HOST_CORES, "0")) or len(os.sched_getaffinity(0))]
    quota = core_quota()
    if quota is not None:
        limits.append(max(1, round(quota)))
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    # torchrun sets it to 1 in every process, whatever there is.
    if threads.isdecimal() and int(threads) and "RANK" not in os.environ:
        limits.append(int(threads))
    return min(limits)


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
    own, added = {os.getpid()}, {os.getpid()}
    while added:
        added = {each for each, parent in parents.items() if parent in added} - own
        own |= added
    return sum(took.get(each, 0.0) for each in own)


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


# Numbers of `mallopt` (malloc.h).
TRIM_THRESHOLD = -1
"""Of bytes that are free at the heap's end, and kept."""
TOP_PAD = -2
"""Of bytes that the heap grows by beyond what is asked for."""
MMAP_THRESHOLD = -3
"""Of bytes from which on a piece is mapped by itself."""
MOST_ARENAS = -8
"""Of pieces of memory that threads take theirs from."""

_MADV_HUGEPAGE = 14
_LIBRARY = ctypes.CDLL(None)

# Not every C library has them.
_mallopt = getattr(_LIBRARY, "mallopt", None)
_malloc_trim = getattr(_LIBRARY, "malloc_trim", None)


def give_back() -> None:
    """Returns free memory to the system, which the C library otherwise keeps."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def tune(option: int, value: int) -> None:
    """Sets an option of the C library's allocator, as the environment does for a program that starts."""
    if _mallopt is not None:
        _mallopt(option, value)


def prefer_large_pages(nbytes: int) -> None:
    """Asks for large pages in the next bytes that the heap grows by; a system that has none leaves them small.

    Args:
        nbytes: fewer than `MMAP_THRESHOLD` and `TRIM_THRESHOLD`, so that they belong to the heap and stay there.
    """
    _LIBRARY.malloc.restype = ctypes.c_void_p
    # None of it is touched, so no memory is taken.
    block = _LIBRARY.malloc(ctypes.c_size_t(nbytes))
    if block:
        page = os.sysconf("SC_PAGESIZE")
        begin = -(-block // page) * page
        madvise = getattr(_LIBRARY, "madvise", None)
        if madvise is not None:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes - page), _MADV_HUGEPAGE)
        _LIBRARY.free(ctypes.c_void_p(block))


def is_full(folder: Path) -> bool:
    """Tells whether this process can add nothing to the file system of a folder."""
    found = os.statvfs(folder)
    return not (found.f_bavail if os.geteuid() else found.f_bfree)


def disk_fails(error: OSError) -> bool:
    """Tells whether the disk itself fails, or the way to one of another host: what was asked for may be there."""
    unmounted = error.errno == errno.ENOTCONN and error.filename is not None
    return unmounted or error.errno in (errno.EIO, errno.ESTALE)


def takes_no_more(error: OSError) -> bool:
    """Tells whether the disk is full, fails or must not be written to: no reason to end the training."""
    return disk_fails(error) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextmanager
def unless(expected: Callable[[OSError], bool]) -> Iterator[None]:
    """Leaves out the rest of its block after an expected error: for what is tried again, or is not needed."""
    try:
        yield
    except OSError as error:
        if not expected(error):
            raise


_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable (src/thread.cpp")
"""What Python and ZeroMQ say; the latter ends the process (SIGABRT)."""


def explained(error: BaseException) -> BaseException:
    """Returns a better error where one says only that a disk fails or no file or thread can be had; else the same."""
    if isinstance(error, OSError) and disk_fails(error):
        return UnfitMachine(
            f"the disk fails ({error.strerror}) at {error.filename or 'a file that was open'}; see what the system's "
            "log says of it (dmesg), and name a run_dir on another disk"
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return _too_many_files(error)
    if not isinstance(error, RuntimeError) or not any(said in str(error) for said in _NO_THREAD):
        return error
    return too_many_threads()


def _too_many_files(error: OSError) -> UnfitMachine:
    most, what = resource.getrlimit(resource.RLIMIT_NOFILE)[0], error.filename or error.strerror
    whose = f"of which a process may have {most:,} (ulimit -n)" if error.errno == errno.EMFILE else "for any process"
    return UnfitMachine(
        f"the system opens no further file or socket ({what}), {whose}; raise that limit, or close what your own code "
        "leaves open"
    )


def too_many_threads() -> UnfitMachine:
    """Returns the error where the system starts no further thread or process, with the limit."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    most = "as many as it likes" if limit == resource.RLIM_INFINITY else f"{limit:,} of them"
    return UnfitMachine(
        f"the system starts no further thread: this user may have {most} (ulimit -u), and its control group has a "
        "limit of its own (pids.max); raise the lower one, or run fewer workers"
    )


def host_name() -> str:
    """Returns what this host is called: as HEADRACE_HOST says, else as the system does."""
    return os.environ.get("HEADRACE_HOST") or socket.gethostname()


def machine_identity() -> str:
    """Returns what differs between machines, and between containers that do not see each other's processes."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def require_working_directory() -> None:
    """Raises:
    UnfitMachine: the directory that this process works in was deleted; libraries below torch end a process there.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UnfitMachine(
            "the working directory of this process was deleted; change to one that exists (cd, os.chdir), or, where a "
            "new one has its path, to that path once more"
        ) from None


def require_linux() -> None:
    """Raises:
    UnfitMachine: this is no Linux, whose anonymous shared memory and futex the exchange is built on.
    """
    if platform.system() != "Linux":
        raise UnfitMachine(
            f"headrace exchanges through Linux's memfd and futex, and this is {platform.system()}; "
            "use Linux, or a Linux container"
        )


def detect(device: str | Sequence[str], ranks: int | None = None, fixed_shapes: bool = True) -> Cluster:
    """Describes this machine, with the devices that `devices.choose` takes of it, or those that are named one by one.

    Raises what `devices.choose`, `one_each` and `choose_each` raise.
    """
    require_linux()
    named = one_each(device)
    kind, found = choose_each(named) if named else choose(str(device), fixed_shapes)
    host = Host(host_name(), cores(), spare_memory_bytes(), found, worker_devices=named)
    return Cluster((host,), ranks, kind)


@cache
def own_version() -> str:
    """Returns the version of headrace that is installed; finding it reads files, for milliseconds."""
    return version("headrace")


@cache
def versions() -> Mapping[str, str]:
    """Returns the versions of "headrace", "torch" and "python"."""
    import torch

    return {"headrace": own_version(), "torch": torch.__version__, "python": platform.python_version()}


def can_paint(stream: TextIO) -> bool:
    """Whether a moving bar may be painted: on a terminal that can, and not in CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return os.environ.get("TERM") != "dumb" and stream.isatty()


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
