"""What a program sets for its whole process, and its workers' processes therefore have, too.

A worker is another process than the one that calls `fit`: without this, `torch.set_default_dtype(torch.float64)` there
would leave models in single precision that a function builds here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.backends import mha

from headrace import internals
from headrace.devices import HOST, autocast_states, float32_backends
from headrace.errors import UsageError

_LEAST_NORMAL = torch.finfo(torch.float64).tiny


def _flags(kind: str, owner: Any, *names: str) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    return {f"{kind} {name}": (partial(getattr, owner, name), partial(setattr, owner, name)) for name in names}


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*value)


def _precision() -> tuple[str, bool] | list[str]:
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        # By backend; torch refuses to say the two older numbers then.
        return [backend.fp32_precision for backend in float32_backends()]


def _set_precision(value: tuple[str, bool] | list[str]) -> None:
    if isinstance(value, tuple):
        torch.set_float32_matmul_precision(value[0])
        torch.backends.cudnn.allow_tf32 = value[1]
        return
    for backend, precision in zip(float32_backends(), value, strict=True):
        backend.fp32_precision = precision


def _flushes() -> bool:
    return not float(torch.tensor(_LEAST_NORMAL, dtype=torch.float64) / 2)


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "argv": (lambda: list(sys.argv), partial(setattr, sys, "argv")),
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "numpy errors": (np.geterr, lambda value: np.seterr(**value)),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (_deterministic, _set_deterministic),
    "precision": (_precision, _set_precision),
    "anomaly": (_anomaly, _set_anomaly),
    "flush denormal": (_flushes, torch.set_flush_denormal),
    "attention fast path": (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    **_flags("cudnn", torch.backends.cudnn, "enabled", "benchmark", "deterministic"),
    **_flags("memory", torch.utils.deterministic, "fill_uninitialized_memory"),
}
"""By name: how a setting is read, and how it is set."""


@dataclass(frozen=True)
class Witness:
    """A batch, its loss in the caller's process with the model as it is built, and how its parameters are updated.

    See `guards/witness.py`.
    """

    batch: Any
    loss: float
    updates: Mapping[str, str]


@dataclass(frozen=True)
class CallerProcess:
    """What a process of a run has of the one that called headrace.

    Attributes:
        settings: by name.
        witness: what a worker's process must compute, too; None where it is the caller's.
    """

    settings: Mapping[str, Any]
    witness: Witness | None = None


def take_settings(caller: CallerProcess | None) -> None:
    """Sets what the caller's process has set, where it is another value here."""
    for name, value in caller.settings.items() if caller else ():
        read, write = _SETTINGS[name]
        if read() != value:
            write(value)


def read_caller() -> CallerProcess:
    """Returns those of this process.

    Raises:
        UsageError: it is in a mode that ends at the caller, and that workers would not be in.
    """
    if any(autocast_states()):
        raise UsageError(
            "this call is within torch.autocast, and workers would not be; call it outside, and give the job "
            'options=hr.Options(precision="bf16"), or use torch.autocast in the model\'s forward'
        )
    if internals.saved_tensors_hooks(False) is not None or internals.dispatch_modes():
        raise UsageError(
            "this call is within torch.autograd.graph.saved_tensors_hooks (save_on_cpu, say) or a "
            "TorchDispatchMode, and workers would not be; call it outside, and enter these in the model's forward"
        )
    device = torch.get_default_device()
    if device.type != HOST:
        raise UsageError(
            f"torch's default device is {device} here, and each worker has its own; call "
            f'torch.set_default_device("cpu") before, and give device="{device.type}"'
        )
    return CallerProcess({name: read() for name, (read, _) in _SETTINGS.items()})
