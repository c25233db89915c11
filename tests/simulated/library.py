"""Compiles the simulated accelerator, once for each of its texts and each version of PyTorch."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

import torch

COMPILER = shutil.which("c++") or ""

_SOURCES = [Path(__file__).with_name(name) for name in ("accelerator.cpp", "device.hpp")]
_BUILT = Path(__file__).resolve().parents[2] / ".cache" / "fake-accelerator"


def library() -> Path:
    """Returns the compiled accelerator; processes that ask for it at the same time wait for the first one's."""
    text = b"".join(source.read_bytes() for source in _SOURCES) + torch.__version__.encode()
    path = _BUILT / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if path.exists():
        return path
    _BUILT.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(".made")
            there = Path(torch.__file__).parent
            places = f"-I{there}/include", f"-I{there}/include/torch/csrc/api/include", f"-L{there}/lib"
            how = "-std=c++20", "-O1", "-shared", "-fPIC", *places, "-ltorch", "-ltorch_cpu", "-lc10"
            command = [COMPILER, str(_SOURCES[0]), "-o", str(made), *how]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.rename(path)
    return path
