"""headrace trains one PyTorch model on many devices: write the model once, name a strategy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace import data, metrics, tasks
    from headrace.comparison import Comparison, compare
    from headrace.engine.threads import ThreadEngine
    from headrace.engine.worker import Worker
    from headrace.metrics import Mean
    from headrace.policies.period import AutoPeriod
    from headrace.ps.applier import Remedies
    from headrace.replica.outer import Elastic, Nesterov
    from headrace.report.tensorboard import TensorBoard
    from headrace.run import Run
    from headrace.script import setup
    from headrace.spec.checkpoints import Checkpoints
    from headrace.spec.job import Job
    from headrace.spec.options import EarlyStopping, Options
    from headrace.strategies import (
        EASGD,
        CentralStorage,
        DiLoCo,
        Downpour,
        Hybrid,
        LocalSGD,
        Mirrored,
        OneDevice,
        ParameterAveraging,
        ParameterServer,
        Pipeline,
        Strategy,
        TensorParallel,
        Unconnected,
    )
    from headrace.trainer import fit, launch

__all__ = [
    "EASGD",
    "AutoPeriod",
    "CentralStorage",
    "Checkpoints",
    "Comparison",
    "DiLoCo",
    "Downpour",
    "EarlyStopping",
    "Elastic",
    "Hybrid",
    "Job",
    "LocalSGD",
    "Mean",
    "Mirrored",
    "Nesterov",
    "OneDevice",
    "Options",
    "ParameterAveraging",
    "ParameterServer",
    "Pipeline",
    "Remedies",
    "Run",
    "Strategy",
    "TensorBoard",
    "TensorParallel",
    "ThreadEngine",
    "Unconnected",
    "Worker",
    "compare",
    "data",
    "fit",
    "launch",
    "metrics",
    "setup",
    "tasks",
]

# What is imported when it is first asked for: `import headrace` alone does not import torch.
_HOMES = {
    "AutoPeriod": "headrace.policies.period",
    "CentralStorage": "headrace.strategies",
    "Checkpoints": "headrace.spec.checkpoints",
    "Comparison": "headrace.comparison",
    "DiLoCo": "headrace.strategies",
    "Downpour": "headrace.strategies",
    "EASGD": "headrace.strategies",
    "EarlyStopping": "headrace.spec.options",
    "Elastic": "headrace.replica.outer",
    "Hybrid": "headrace.strategies",
    "Job": "headrace.spec.job",
    "LocalSGD": "headrace.strategies",
    "Mean": "headrace.metrics",
    "Mirrored": "headrace.strategies",
    "Nesterov": "headrace.replica.outer",
    "OneDevice": "headrace.strategies",
    "Options": "headrace.spec.options",
    "ParameterAveraging": "headrace.strategies",
    "ParameterServer": "headrace.strategies",
    "Pipeline": "headrace.strategies",
    "Remedies": "headrace.ps.applier",
    "Run": "headrace.run",
    "Strategy": "headrace.strategies",
    "TensorBoard": "headrace.report.tensorboard",
    "ThreadEngine": "headrace.engine.threads",
    "TensorParallel": "headrace.strategies",
    "Unconnected": "headrace.strategies",
    "Worker": "headrace.engine.worker",
    "compare": "headrace.comparison",
    "fit": "headrace.trainer",
    "launch": "headrace.trainer",
    "setup": "headrace.script",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"headrace.{name}")
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
