"""Every strategy by its name. To add one, copy `one_device.py`, write its two methods and add a line here.

Another package adds its own by an entry point: `[project.entry-points."headrace.strategies"]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.registry import Registry

if TYPE_CHECKING:
    from headrace.strategies.strategy import Strategy

_ROOM = "headrace.strategies"

STRATEGIES: Registry[type[Strategy]] = Registry(
    _ROOM,
    {
        "central_storage": f"{_ROOM}.central_storage:CentralStorage",
        "context_parallel": f"{_ROOM}.context_parallel:ContextParallel",
        "downpour": f"{_ROOM}.downpour:Downpour",
        "fully_sharded": f"{_ROOM}.fully_sharded:FullySharded",
        "gossip": f"{_ROOM}.gossip:Gossip",
        "hybrid": f"{_ROOM}.hybrid:Hybrid",
        "mirrored": f"{_ROOM}.mirrored:Mirrored",
        "one_device": f"{_ROOM}.one_device:OneDevice",
        "parameter_averaging": f"{_ROOM}.parameter_averaging:ParameterAveraging",
        "parameter_server": f"{_ROOM}.parameter_server:ParameterServer",
        "pipeline": f"{_ROOM}.pipeline:Pipeline",
        "sandblaster": f"{_ROOM}.sandblaster:Sandblaster",
        "tensor_parallel": f"{_ROOM}.tensor_parallel:TensorParallel",
        "tpu": f"{_ROOM}.tpu:TPU",
        "unconnected": f"{_ROOM}.unconnected:Unconnected",
    },
)
"""Every strategy by its name."""

SHORT_NAMES: Registry[Callable[..., Strategy]] = Registry(
    "",
    {
        "diloco": f"{_ROOM}.parameter_averaging:DiLoCo",
        "easgd": f"{_ROOM}.parameter_averaging:EASGD",
        "local_sgd": f"{_ROOM}.parameter_averaging:LocalSGD",
        "multi_worker_mirrored": f"{_ROOM}.mirrored:MultiWorkerMirrored",
    },
)
"""Other names of strategies, some with other numbers; plans and events say the strategy's own."""
