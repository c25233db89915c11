"""Does the faults to processes, files and disks, from outside."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import permutations
from pathlib import Path

from storm.clock import Clocks
from storm.disks import Disk, FailingDisk
from storm.hosts import HOSTS, cut, mend
from storm.jobs import TIMEOUT_S
from storm.schedule import CLOCKED, DAMAGES, LINKS, Fault

__all__ = ["GROUPS", "damage", "strike", "ungroup"]

SLOW_S, SLICE_S = 2.0, 0.02
"""How long a process is slow, and how long it stands still each time."""

LIMITS = {
    "few descriptors": (resource.RLIMIT_NOFILE, 16),
    "small files": (resource.RLIMIT_FSIZE, 4096),
    "little memory": (resource.RLIMIT_AS, 1 << 20),
}
GROUPS = Path("/sys/fs/cgroup")
"""Control groups, version 1: a folder for each controller."""

OWN_GROUPS = f"storm-{os.getpid()}-"
"""What the names of this storm's groups begin with: several storms may run side by side."""

PERIOD_US, QUOTA_US = 100_000, 5_000
TO_LAUNCHER = {"terminate": signal.SIGTERM, **dict.fromkeys(("kill launcher", *DAMAGES), signal.SIGKILL)}
PAIRS = tuple(permutations(range(HOSTS), 2))


def strike(
    fault: Fault,
    launcher: int,
    ranks: Mapping[int, int],
    disk: Disk | FailingDisk | None,
    clocks: Clocks | None,
) -> tuple[int, ...]:
    """Does a fault to one of the processes (by rank), the command, the disk, a link or a clock.

    Returns the ranks it struck.

    Raises:
        ProcessLookupError: the process has ended meanwhile.
    """
    if fault.kind in TO_LAUNCHER:
        os.kill(launcher, TO_LAUNCHER[fault.kind])
        return ()
    if fault.kind.endswith("disk"):
        assert disk is not None
        disk.fail(fault)
        return ()
    if fault.kind in CLOCKED:
        assert clocks is not None
        clocks.jump(fault.pick)
        return ()
    if fault.kind in LINKS:
        pair = PAIRS[fault.pick % len(PAIRS)]
        cut(*pair, both=fault.kind != "cut one way")
        if fault.kind == "short cut":
            threading.Timer(TIMEOUT_S / 2, mend).start()
        return pair
    rank = sorted(ranks)[fault.pick % len(ranks)]
    pid = ranks[rank]
    if fault.kind in LIMITS:
        which, most = LIMITS[fault.kind]
        resource.prlimit(pid, which, (most, resource.prlimit(pid, which)[1]))
    elif fault.kind == "few threads":
        group = _group("pids", pid)
        (group / "pids.max").write_text((group / "pids.current").read_text())
    elif fault.kind == "quota":
        group = _group("cpu", pid)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        threading.Timer(SLOW_S, _unlimit, (group,)).start()
    elif fault.kind in ("pause", "slow"):
        threading.Thread(target=_halting(pid, fault.kind)).start()
    else:
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    return (rank,)


def _group(controller: str, pid: int) -> Path:
    """Puts a process into a control group of its own."""
    group = GROUPS / controller / f"{OWN_GROUPS}{pid}"
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(pid))
    return group


def _unlimit(group: Path) -> None:
    """Puts the process back where it was: in a group of its own it would keep another share of the cores."""
    with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
        (group / "cpu.cfs_quota_us").write_text("-1")
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)


def ungroup() -> None:
    """Removes the control groups of processes that have ended."""
    for group in GROUPS.glob(f"*/{OWN_GROUPS}*"):
        if not (group / "cgroup.procs").read_text():
            group.rmdir()


def _halting(pid: int, kind: str) -> Callable[[], None]:
    stands, count = (TIMEOUT_S / 2, 1) if kind == "pause" else (SLICE_S, int(SLOW_S / SLICE_S / 2))

    def halt() -> None:
        with suppress(ProcessLookupError):  # it ended meanwhile
            for _ in range(count):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stands)
                os.kill(pid, signal.SIGCONT)
                time.sleep(SLICE_S)

    return halt


def damage(fault: Fault, run_dir: Path) -> None:
    """Changes a byte of the newest checkpoint, or cuts off its end; where there is none, nothing."""
    found = sorted(run_dir.glob("checkpoints/step-*[0-9]"))
    if not found:
        return
    chance = random.Random(fault.pick)
    path = chance.choice(sorted(found[-1].iterdir()))
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    if fault.kind == "cut checkpoint":
        del content[place:]
    else:
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
