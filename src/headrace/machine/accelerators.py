"""What accelerators are, and what carries their tensors between processes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.devices import DeviceKind, runtime_of
from headrace.errors import RunFailed

if TYPE_CHECKING:
    import torch


def device_title(device: str) -> str:
    """Returns what a device's maker calls it, with its memory: "NVIDIA H100 80GB HBM3, 85 GB"."""
    runtime, index = runtime_of(device), int(device.partition(":")[2] or 0)
    ask = getattr(runtime, "get_device_properties", None)
    memory = getattr(ask(index), "total_memory", 0) if ask else 0
    return str(runtime.get_device_name(index)) + f", {memory / 1e9:.0f} GB" * bool(memory)


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Returns the bytes of this process's tensors on a device, and those that are free there; zeros where not known."""
    runtime = runtime_of(device.type)
    used, info = getattr(runtime, "memory_allocated", None), getattr(runtime, "mem_get_info", None)
    return (int(used(device)), int(info(device)[0])) if used and info else (0, 0)


def unlike(titles: Sequence[str], balances: bool) -> str:
    """Returns what is to be said where workers' accelerators are not alike; "" if they are.

    `titles` are theirs by rank, "" of a worker on the CPU; `balances` says whether their shares follow their speed.
    """
    ranks: dict[str, list[int]] = {}
    for rank, title in enumerate(titles):
        if title:
            ranks.setdefault(title, []).append(rank)
    if len(ranks) < 2:
        return ""
    which = "; ".join(f"rank{'s' * (len(at) > 1)} {', '.join(map(str, at))}: {title}" for title, at in ranks.items())
    how = "their shares follow their speed" if balances else "equal shares wait for the slowest: balance='speed'"
    return f"the workers' accelerators are not alike ({which}); {how}"


def backend_version(kind: DeviceKind) -> str:
    """Returns the version of the library that carries a device's tensors between processes; "" if torch has none."""
    import torch.distributed as dist

    if not kind.backend or not dist.is_available() or not dist.is_backend_available(kind.backend):
        return ""
    library = getattr(runtime_of(kind.name), kind.backend, None)
    return ".".join(map(str, library.version())) if library else "of torch"


_BROKEN = ("uncorrectable ecc error", "device lost", "device_lost", "gpu is lost", "fallen off the bus")
_KERNEL = ("unspecified launch failure", "an illegal memory access", "hardware stack error")
_TAKEN = ("busy or unavailable", "-capable device is detected")
"""What CUDA and SYCL say of a device that has failed, of one or of what it computes, and of one that is not there."""


def explained_by_device(error: BaseException, device: str, where: str) -> BaseException:
    """Returns a better error where one says that a device has failed, with the remedy; else the same.

    `where` says whose device it is: "rank 1 on b". Nothing can be asked of the device any more.
    """
    said = " ".join(str(error).split()).lower() if isinstance(error, RuntimeError) else ""
    if any(phrase in said for phrase in _BROKEN):
        remedy = (
            "its hardware or driver has failed, see the system's log (dmesg, Xid) and nvidia-smi -q; start without it "
            "or its host, and go on from the last checkpoint with resume=True (--resume)"
        )
    elif any(phrase in said for phrase in _KERNEL):
        remedy = (
            "a kernel went beyond its memory, or the device has failed: if it is this device alone (dmesg, Xid), "
            "start without it; else CUDA_LAUNCH_BLOCKING=1 shows the operation. resume=True goes on from the last "
            "checkpoint"
        )
    elif any(phrase in said for phrase in _TAKEN):
        remedy = (
            "another process has it for itself (nvidia-smi shows which, and the compute mode), or it was taken from "
            "this one: end that process, or give this one another device"
        )
    else:
        return error
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return RunFailed(f"{device} of {where} cannot be used: {first:.200}; {remedy}")


_LIBRARY = "libnvidia-ml.so.1"
"""NVIDIA's management library."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def memories(kind: DeviceKind) -> tuple[int, ...]:
    """Returns the bytes of memory of each device of a kind that this process may see, or () where not known.

    NVIDIA's management library says it without beginning to use a device, so that processes may still be forked.
    """
    # That of the one driver in the table.
    if not kind.driver:
        return ()
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    if library.nvmlInit_v2() != 0:
        return ()
    try:
        bytes_each = [_memory(library, name) for name in _visible(library, kind.visible)]
    finally:
        library.nvmlShutdown()
    # Where one is not known, neither is which is the largest.
    return tuple(bytes_each) if all(bytes_each) else ()


def _visible(library: ctypes.CDLL, variable: str) -> list[str]:
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    every = [str(index) for index in range(count.value)]
    named = os.environ.get(variable)
    return every if named is None else [name.strip() for name in named.split(",") if name.strip()]


def _memory(library: ctypes.CDLL, name: str) -> int:
    """Returns that of a GPU, given by its number or its UUID; 0 where it is not known."""
    handle, memory = ctypes.c_void_p(), _Memory()
    if name.isdecimal():
        problem = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        problem = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    if problem or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return 0
    return int(memory.total)
