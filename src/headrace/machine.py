"""What this machine has."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from headrace.errors import UnfitMachine, UsageError
from headrace.spec.cluster import Cluster, Host

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Returns the processor cores that this process may use: its affinity, and its container's quota."""
    count = len(os.sched_getaffinity(0))
    if _QUOTA.is_file():
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    return count


def host_name() -> str:
    """Returns what this host is called: as HEADRACE_HOST says, else as the system does."""
    return os.environ.get("HEADRACE_HOST") or socket.gethostname()


def require_linux() -> None:
    """Raises:
    UnfitMachine: this is no Linux, whose anonymous shared memory and futex the exchange is built on.
    """
    if platform.system() != "Linux":
        raise UnfitMachine(
            f"headrace exchanges through Linux's memfd and futex, and this is {platform.system()}; "
            "use Linux, or a Linux container"
        )


def detect(device: str, ranks: int | None = None) -> Cluster:
    """Describes this machine.

    Args:
        device: "auto" takes CUDA where there is one, else the CPU; or "cpu", "cuda".
        ranks: how many processes a launcher has started.

    Raises:
        UsageError: an unknown device.
        UnfitMachine: "cuda" on a machine without.
    """
    from headrace.shared_memory.segment import available_bytes

    require_linux()
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is 'auto', 'cpu' or 'cuda', got {device!r}")
    found = _accelerators() if device != "cpu" else ()
    if device == "cuda" and not found:
        raise UnfitMachine(
            "device='cuda' and torch sees no CUDA device here; use device='cpu', or a CUDA build of torch"
        )
    host = Host(host_name(), cores(), available_bytes(), found)
    return Cluster((host,), ranks, "cuda" if found else "cpu")


@cache
def versions() -> Mapping[str, str]:
    """Returns the versions of "headrace", "torch" and "python"; finding ours reads files, for milliseconds."""
    import torch

    return {"headrace": version("headrace"), "torch": torch.__version__, "python": platform.python_version()}


def can_paint(stream: TextIO) -> bool:
    """Whether a moving bar may be painted: on a terminal that can, and not in CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def check_shared_memory() -> str | None:
    """Returns None if processes can share anonymous memory and wake each other here, else the reason."""
    try:
        require_linux()
        from headrace.shared_memory import futex
        from headrace.shared_memory.control_page import ControlPage
        from headrace.shared_memory.segment import SharedSegment

        segment = SharedSegment.create(ControlPage.nbytes(1), "probe")
        page = ControlPage(segment, 1)
        SharedSegment.open(os.getpid(), segment.descriptor, segment.nbytes).close()
        futex.wake(page.ranks[0].barrier_address)
        futex.wait(page.ranks[0].barrier_address, 1, 0.001)
        segment.close()
    except (UnfitMachine, OSError) as error:
        return str(error)
    return None


def _accelerators() -> tuple[str, ...]:
    # Counting by NVML leaves CUDA uninitialised, so that the workers may still be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if not torch.backends.cuda.is_built():
        return ()
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
