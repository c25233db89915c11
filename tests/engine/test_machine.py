"""What the machine is found to have."""

from __future__ import annotations

import errno
import io
import os
import platform
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.cli import run
from headrace.engine.torchrun.address import launched_ranks
from headrace.errors import UnfitMachine, UsageError
from headrace.machine import limits, resources
from headrace.machine.identity import can_paint, detect, require_linux
from headrace.machine.limits import explained
from headrace.machine.resources import (
    ProcessorTimes,
    core_quota,
    cores,
    load_average,
    memory_limit_bytes,
    most_threads,
    processor_name,
    processor_times,
    spare_memory_bytes,
)
from headrace.policies.roles import worker_roles
from headrace.shared_memory.control_page import check_shared_memory

QUOTAS = {
    "max 100000": 64,
    "100000 100000": 1,
    "50000 100000": 1,
    "250000 100000": 2,
    "350000 100000": 4,
    "9000000 100000": 64,
}


@pytest.mark.parametrize(("text", "most"), QUOTAS.items())
def test_cores_respect_a_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, most: int
) -> None:
    root = files_of(tmp_path, {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": text})
    monkeypatch.setattr(resources, "core_quota", lambda: core_quota(root))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores() == most


@pytest.mark.parametrize(
    ("variables", "most", "threads"),
    [
        ({}, 0, (8, 4)),
        ({"OMP_NUM_THREADS": "3"}, 3, (3, 3)),
        ({"OMP_NUM_THREADS": "2,4"}, 2, (2, 2)),
        ({"OMP_NUM_THREADS": "64"}, 64, (8, 4)),
        ({"OMP_NUM_THREADS": "0"}, 0, (8, 4)),
        ({"OMP_NUM_THREADS": "many"}, 0, (8, 4)),
        ({"OMP_NUM_THREADS": "1", "RANK": "0"}, 0, (8, 4)),
    ],
)
def test_what_openmp_is_told_limits_the_threads_of_each_process_and_no_core(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], most: int, threads: tuple[int, int]
) -> None:
    monkeypatch.setattr(resources, "core_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (cores(), most_threads()) == (8, most)
    cluster = detect("cpu")
    assert [[role.threads for role in worker_roles("mirrored", count, cluster)] for count in (1, 2)] == [
        [threads[0]], [threads[1]] * 2
    ]  # fmt: skip


def files_of(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:        4096 kB\nMemFree: 10 kB\nMemAvailable:    1024 kB\n"}


def test_the_tightest_group_of_all_above_counts(tmp_path: Path) -> None:
    root = files_of(
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
    root = files_of(
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


COUNTS = "anon 3000\nshmem 1000\nactive_file 1500\ninactive_file 2500\n"


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": "9000\n",
            "sys/fs/cgroup/box/memory.current": "8000\n",
            "sys/fs/cgroup/box/memory.stat": COUNTS,
        },
        {
            "proc/self/cgroup": "4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9000\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "8000\n",
            "sys/fs/cgroup/memory/box/memory.stat": "active_file 7\ntotal_active_file 1500\ntotal_inactive_file 2500\n",
        },
    ],
)
def test_cached_files_in_a_group_leave_room_for_memory(tmp_path: Path, files: dict[str, str]) -> None:
    assert spare_memory_bytes(files_of(tmp_path, {**MEMINFO, **files})) == 9000 - 8000 + 1500 + 2500


def test_no_limit(tmp_path: Path) -> None:
    root = files_of(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/\n"})
    assert core_quota(root) is None
    assert spare_memory_bytes(root) == 1024 * 1024


def test_a_quota_of_minus_one_is_none(tmp_path: Path) -> None:
    root = files_of(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert core_quota(root) is None


def test_this_machine() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    assert 0 < spare_memory_bytes() <= memory_limit_bytes()


def test_detect_describes_this_host() -> None:
    cluster = detect("cpu", ranks=3)
    (host,) = cluster.hosts
    assert (host.name, host.cores, cluster.ranks, cluster.device) == (socket.gethostname(), cores(), 3, "cpu")
    assert host.memory_bytes > 0


def test_detect_refuses_other_devices() -> None:
    with pytest.raises(UsageError, match="device is 'auto', 'cpu', 'cuda', 'tpu', 'xpu' or 'mps', got 'gpu'"):
        detect("gpu")


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.devices.found", lambda kind: ())
    with pytest.raises(UnfitMachine, match="sees no CUDA device here; use device='cpu'"):
        detect("cuda")
    assert detect("auto").device == "cpu"


def test_only_linux_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    require_linux()
    assert check_shared_memory() is None
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(UnfitMachine, match="this is Darwin; use Linux, or a Linux container"):
        require_linux()
    assert "Darwin" in (check_shared_memory() or "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variables", "moving"), [({}, True), ({"CI": "true"}, False), ({"CI": "false"}, True),
                                                   ({"CI": "0"}, True), ({"TERM": "dumb"}, False)])  # fmt: skip
def test_a_bar_moves_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], moving: bool
) -> None:
    for name in ("CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert can_paint(Terminal()) is moving
    assert can_paint(io.StringIO()) is False


WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_a_launcher_says_how_many_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_ranks() is None
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    assert launched_ranks() == 4


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_launcher_that_says_half(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in WHOLE.keys() - {missing}:
        monkeypatch.setenv(name, WHOLE[name])
    with pytest.raises(UsageError, match=f"but not {missing}"):
        launched_ranks()


def test_what_the_processors_did(tmp_path: Path) -> None:
    stat = (
        "cpu  100 20 30 800 40 5 5 100 7 7\ncpu0 50 10 15 400 20 2 3 50 3 4\ncpu1 50 10 15 400 20 3 2 50 4 3\nintr 9\n"
    )
    times = processor_times(files_of(tmp_path, {"proc/stat": stat, "proc/loadavg": "1.25 0.9 0.5 2/300 99\n"}))
    tick = os.sysconf("SC_CLK_TCK")
    assert times == ProcessorTimes(160 / tick, 100 / tick, 1100 / tick, 2)
    assert load_average(tmp_path) == 1.25
    assert processor_times(tmp_path / "none") is None
    assert load_average(tmp_path / "none") is None


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 3000\n")
    assert processor_name(tmp_path) == "Abacus 3000"
    assert processor_name(tmp_path / "none") == platform.machine()


def test_no_further_file_is_said_with_the_limit() -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file", "a")
    assert explained(missing) is missing
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    full = explained(OSError(errno.EMFILE, "Too many open files", "/proc/7/stat"))
    assert isinstance(full, UnfitMachine)
    assert f"no further file or socket (/proc/7/stat), of which a process may have {most:,} (ulimit -n)" in str(full)
    assert "for any process" in str(explained(OSError(errno.ENFILE, "Too many open files in system")))


def test_a_file_of_the_kernel_that_cannot_be_opened_is_not_one_that_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory_limit_bytes(tmp_path) == 0

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/meminfo")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        spare_memory_bytes(tmp_path)


def test_a_kernel_that_the_processor_lacks_is_said_with_the_remedy() -> None:
    said = "could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with"
    error = explained(RuntimeError(said))
    assert isinstance(error, UnfitMachine)
    assert "for the LSTM forward propagation primitive; where precision='bf16', use 'fp32'" in str(error)


def test_no_further_thread_is_said_with_the_limit(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (64, 64))
    other = RuntimeError("shapes differ")
    assert explained(other) is other
    error = explained(RuntimeError("can't start new thread"))
    assert isinstance(error, UnfitMachine)
    assert "this user may have 64 of them (ulimit -u)" in str(error)

    def refuse(_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(typer.main, "get_command", refuse)
    assert run(["doctor"]) == UnfitMachine.exit_code
    assert capsys.readouterr().err.startswith("error: the system starts no further thread")
