import os
from pathlib import Path

import pytest

from headrace.cli.limits import core_quota, cores, memory_limit_bytes, spare_memory_bytes


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:        4096 kB\nMemFree: 10 kB\nMemAvailable:    1024 kB\n"}


def test_the_tightest_group_of_all_above_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
            "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
            "sys/fs/cgroup/jobs/mine/memory.current": "4096\n",
            "sys/fs/cgroup/jobs/memory.max": "500000\n",
            "sys/fs/cgroup/jobs/memory.current": "200000\n",
        },
    )
    assert core_quota(root) == 1.5
    assert spare_memory_bytes(root) == 300_000
    assert memory_limit_bytes(root) == 4096 * 1024


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9000\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "10000\n",
        },
    )
    assert core_quota(root) == 0.5
    assert spare_memory_bytes(root) == 0


def test_no_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/\n"})
    assert core_quota(root) is None
    assert spare_memory_bytes(root) == 1024 * 1024


def test_a_quota_of_minus_one_is_none(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert core_quota(root) is None


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="needs Linux")
def test_this_machine() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    assert 0 < spare_memory_bytes() <= memory_limit_bytes()
