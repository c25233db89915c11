"""On what is measured: a device, its threads, with or without cuDNN and the compiler; and how much effort is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from headrace import devices
from headrace.machine.identity import host_name, versions
from headrace.machine.resources import cores, memory_limit_bytes, processor_name
from headrace.report.format import byte_count

GPU = "GPU"
NO_GPU = "no CUDA device here"


@dataclass(frozen=True)
class Setting:
    """One column: a device, and how it is used."""

    name: str
    device: torch.device
    threads: int
    cudnn: bool = True
    compiled: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Sets threads and cuDNN, and afterwards what was before."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.backends.cudnn.flags(enabled=self.cudnn) if self.on_gpu else contextlib.nullcontext():
                yield
        finally:
            torch.set_num_threads(before)

    @property
    def on_gpu(self) -> bool:
        """Whether it is one of CUDA's devices."""
        return self.device.type == devices.GPU


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        name: for people, and to tell two measurements apart.
        cell_s: how long one number is measured; at least two repetitions.
        longest_s: a repetition that would take longer is left out, where that is known before.
        until_s: after so many seconds nothing new is begun.
        networks: how many of `networks.NETWORKS`.
        compiled: whether torch.compile is tried.
    """

    name: str
    cell_s: float
    longest_s: float
    until_s: float
    sizes: tuple[int, ...]
    file_bytes: int
    files: int
    networks: int
    compiled: bool


QUICK = Effort("quick", 0.25, 2.0, 30.0, (256, 1024, 2048), 64_000_000, 500, 3, compiled=False)
FULL = Effort(
    "full", 2.0, 10.0, float("inf"), (256, 512, 1024, 2048, 4096, 8192), 1_000_000_000, 5000, 10, compiled=True
)


def processor_settings() -> list[Setting]:
    """Returns the CPU with 1, 2, 4 ... and all threads."""
    most = cores()
    counts = sorted({1, *(2**power for power in range(1, 10) if 2**power < most), most})
    return [Setting(f"CPU, {count} thread{'s' * (count > 1)}", torch.device("cpu"), count) for count in counts]


def gpu_settings() -> list[Setting]:
    """Returns the first CUDA device, if there is one."""
    return [Setting(GPU, torch.device(devices.GPU, 0), cores())] if _gpu_names() else []


def _gpu_names() -> list[str]:
    return devices.device_names(devices.kind_of(devices.GPU))


def repeat(act: Callable[[], object], setting: Setting, seconds: float) -> list[float]:
    """Returns the seconds of repetitions: as many as fit, at least two, after one that does not count.

    Short ones are repeated inside a repetition, so that the clock does not count.
    """
    took = _timed(act, setting, 1)
    took = _timed(act, setting, 1) if took < seconds else took
    inner = max(1, round(2e-3 / max(took, 1e-7)))
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 2 or (time.perf_counter() < until and len(times) < 100):
        times.append(_timed(act, setting, inner) / inner)
    return times


def _timed(act: Callable[[], object], setting: Setting, count: int) -> float:
    devices.synchronize(setting.device)
    began = time.perf_counter()
    for _ in range(count):
        act()
    devices.synchronize(setting.device)
    return time.perf_counter() - began


def machine_facts() -> Mapping[str, str]:
    """Returns what a reader must know of this machine."""
    return {
        "host": host_name(),
        "processor": f"{processor_name()}, {cores()} cores",
        "memory": byte_count(memory_limit_bytes()),
        "GPU": ", ".join(_gpu_names()) or "none",
        **versions(),
    }
