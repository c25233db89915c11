"""An accelerator that every machine with a C++ compiler has, see `accelerator.cpp`; README.md says how to use it.

Importing this file adds it, as "fake", to PyTorch and to the device table of this process, until the process ends: so
only programs of their own import it, and their workers, where the job names a function of a file that does.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.devices import DEVICES, DeviceKind
from simulated.library import library
from simulated.records import COUNTERS, with_waits

if "_pytest" in sys.modules:
    raise ImportError("the simulated accelerator would stay in pytest's process, for all tests: import it in a program")

NAME = "fake"


def _load() -> ctypes.CDLL:
    path = str(library())
    torch.ops.load_library(path)
    loaded = ctypes.CDLL(path)
    for name in ("fake_counter", "fake_gate", "fake_blocks"):
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.fake_fault.argtypes = [ctypes.c_char_p]
    loaded.fake_limit.argtypes = [ctypes.c_int, ctypes.c_int64]
    for name in ("fake_wait_before", "fake_open", "fake_is_open"):
        getattr(loaded, name).argtypes = [ctypes.c_int64]
    return loaded


LIBRARY = _load()


def _identity(index: int) -> str:
    """The UUID of a device of this host."""
    host = os.environ.get("HEADRACE_HOST") or socket.gethostname()
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{host}/{index}')}"


def _visible() -> list[int]:
    """Which of this host's devices this process sees: all FAKE_DEVICES, or those of FAKE_VISIBLE_DEVICES.

    That is a list of numbers or of UUIDs, which ends where one is not there, as CUDA_VISIBLE_DEVICES does.
    """
    count = int(os.environ.get("FAKE_DEVICES", "2"))
    named = os.environ.get("FAKE_VISIBLE_DEVICES")
    if named is None:
        return list(range(count))
    numbers = {**{str(index): index for index in range(count)}, **{_identity(index): index for index in range(count)}}
    found: list[int] = []
    for name in named.split(","):
        if name.strip() not in numbers:
            break
        found.append(numbers[name.strip()])
    return found


class Runtime:
    """What `torch.fake` is: what PyTorch and headrace ask of a device's module. It has one generator."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._visible = _visible()
        LIBRARY.fake_set_devices(len(self._visible))
        if "FAKE_MEMORY" in os.environ:
            for index in range(len(self._visible)):
                self.set_memory_limit(int(os.environ["FAKE_MEMORY"]), index)

    # Streams and events are torch's own, which ask the accelerator.
    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=self._place(device), priority=priority)

    def Event(self, enable_timing: bool = False, **_: object) -> torch.Event:
        return torch.Event(device=NAME, enable_timing=enable_timing)

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(self._place(device))

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(self._place(device))

    def is_available(self) -> bool:
        return bool(self._visible)

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self._visible)

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(self._place(device))

    def _place(self, device: Any = None) -> torch.device:
        if isinstance(device, int):
            return torch.device(NAME, device)
        found = torch.device(device) if device is not None else torch.device(NAME)
        return found if found.index is not None else torch.device(NAME, self.current_device())

    def get_device_name(self, index: int) -> str:
        return "Fake"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        index = self._place(device).index
        identity = _identity(self._visible[index]).removeprefix("GPU-")
        _, total = self.mem_get_info(index)
        return SimpleNamespace(name=self.get_device_name(index), uuid=identity, total_memory=total, major=9, minor=0)

    # Memory.
    def set_memory_limit(self, most: int, device: Any = None) -> None:
        """Lets allocations beyond so many bytes fail with torch's OutOfMemoryError."""
        LIBRARY.fake_limit(self._place(device).index, most)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        free, total = torch.accelerator.get_memory_info(self._place(device))
        return free, total

    def memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.memory_allocated(self._place(device))

    def max_memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.max_memory_allocated(self._place(device))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats(self._place(device))

    def empty_cache(self) -> None:
        pass

    # Random numbers.
    def manual_seed_all(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: object = None) -> Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        self._generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def counters() -> dict[str, int]:
    """What this process has done so far, by the names of `COUNTERS`; "waits" is the sum of `WAITS`."""
    return with_waits({name: int(LIBRARY.fake_counter(place)) for place, name in enumerate(COUNTERS)})


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Gives a dict that has, after the block, how much each counter has risen in it."""
    found: dict[str, int] = {}
    before = counters()
    yield found
    found.update({name: value - before[name] for name, value in counters().items()})


@contextmanager
def no_waits() -> Iterator[None]:
    """Lets whatever would wait for a device, in any thread of this process, raise: the traceback says who waits."""
    LIBRARY.fake_forbid_waits(1)
    try:
        yield
    finally:
        LIBRARY.fake_forbid_waits(0)


def live_blocks() -> int:
    """How many pieces of device memory this process holds, on all its devices."""
    return int(LIBRARY.fake_blocks())


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """A loss: of a job that has it, workers that are processes import this file, too."""
    return F.cross_entropy(output, target)


def on_device(loss: Callable[..., Any], *arguments: Any) -> Any:
    """The same loss, of which workers import this file: `partial(on_device, loss)`."""
    return loss(*arguments)


def row(**fields: Any) -> DeviceKind:
    """The device's row of headrace's table."""
    known: Mapping[str, Any] = {
        "title": "fake accelerator",
        "remedy": "a C++ compiler",
        "streams": True,
        "visible": "FAKE_VISIBLE_DEVICES",
        **fields,
    }
    return DeviceKind(NAME, **known)


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, Runtime())
# Without collectives, which nccl.py adds: what its workers exchange must go another way.
DEVICES[NAME] = row()
if os.environ.get("SIMULATED_NCCL"):
    importlib.import_module("simulated.nccl")
