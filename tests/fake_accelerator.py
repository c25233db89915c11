"""An accelerator that every machine with a C++ compiler has, as `fake_accelerator.cpp` describes it.

Importing this file adds it, as "fake", to PyTorch and to the device table of this process, until the process ends: so
only programs of their own import it, and their workers, where the job names a function of a file that does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.devices import DEVICES, DeviceKind

NAME = "fake"
COMPILER = shutil.which("c++") or ""

_SOURCE = Path(__file__).with_suffix(".cpp")
_BUILT = Path(__file__).resolve().parents[1] / ".cache" / "fake-accelerator"


class Runtime:
    """What `torch.fake` is: what PyTorch and headrace ask of a device's module.

    It has one generator, and streams that do nothing.
    """

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    current_stream, stream = staticmethod(torch.cpu.current_stream), staticmethod(torch.cpu.stream)

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def get_device_name(self, index: int) -> str:
        return f"Fake {index}"

    def manual_seed_all(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: object = None) -> Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        self._generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def _library() -> Path:
    """Compiles the accelerator, once for each of its texts and each version of PyTorch."""
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()
    library = _BUILT / f"{digest[:16]}.so"
    if not library.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        there = Path(torch.__file__).parent
        places = f"-I{there}/include", f"-I{there}/include/torch/csrc/api/include", f"-L{there}/lib"
        how = "-std=c++20", "-O0", "-shared", "-fPIC", *places, "-ltorch", "-ltorch_cpu", "-lc10"
        subprocess.run([COMPILER, str(_SOURCE), "-o", str(made), *how], check=True, capture_output=True, text=True)
        made.rename(library)
    return library


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """A loss: of a job that has it, workers that are processes import this file, too."""
    return F.cross_entropy(output, target)


torch.ops.load_library(str(_library()))
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, Runtime())
# Without collectives: what its workers exchange must go another way.
DEVICES[NAME] = DeviceKind(NAME, "fake accelerator", remedy="a C++ compiler")
