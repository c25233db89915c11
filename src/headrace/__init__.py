"""headrace trains one PyTorch model on many devices: write the model once, name a strategy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace import data, metrics, tasks
    from headrace.api.comparison import Comparison, compare
    from headrace.api.fit import fit, launch
    from headrace.api.run import Run
    from headrace.api.setup import setup
    from headrace.averaging.outer_steps import Elastic, Nesterov
    from headrace.averaging.period import AutoPeriod
    from headrace.engine.threads import ThreadEngine
    from headrace.metrics import Mean
    from headrace.parameter_server.server.optimizer import Remedies
    from headrace.report.views.tensorboard import TensorBoard
    from headrace.spec.job import Job
    from headrace.spec.options import Checkpoints, EarlyStopping, Options
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
    from headrace.worker.worker import Worker

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
    "AutoPeriod": "headrace.averaging.period",
    "CentralStorage": "headrace.strategies",
    "Checkpoints": "headrace.spec.options",
    "Comparison": "headrace.api.comparison",
    "DiLoCo": "headrace.strategies",
    "Downpour": "headrace.strategies",
    "EASGD": "headrace.strategies",
    "EarlyStopping": "headrace.spec.options",
    "Elastic": "headrace.averaging.outer_steps",
    "Hybrid": "headrace.strategies",
    "Job": "headrace.spec.job",
    "LocalSGD": "headrace.strategies",
    "Mean": "headrace.metrics",
    "Mirrored": "headrace.strategies",
    "Nesterov": "headrace.averaging.outer_steps",
    "OneDevice": "headrace.strategies",
    "Options": "headrace.spec.options",
    "ParameterAveraging": "headrace.strategies",
    "ParameterServer": "headrace.strategies",
    "Pipeline": "headrace.strategies",
    "Remedies": "headrace.parameter_server.server.optimizer",
    "Run": "headrace.api.run",
    "Strategy": "headrace.strategies",
    "TensorBoard": "headrace.report.views.tensorboard",
    "ThreadEngine": "headrace.engine.threads",
    "TensorParallel": "headrace.strategies",
    "Unconnected": "headrace.strategies",
    "Worker": "headrace.worker.worker",
    "compare": "headrace.api.comparison",
    "fit": "headrace.api.fit",
    "launch": "headrace.api.fit",
    "setup": "headrace.api.setup",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"headrace.{name}")
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
