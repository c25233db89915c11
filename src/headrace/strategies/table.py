"""Every strategy by its name. To add one, copy `one_device.py`, write its two methods and add a line here.

Another package adds its own by an entry point: `[project.entry-points."headrace.strategies"]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headrace.errors import UnknownName
from headrace.registry import Registry

if TYPE_CHECKING:
    from headrace.strategies.strategy import Strategy

_ROOM = "headrace.strategies"

STRATEGIES: Registry[type[Strategy]] = Registry(
    _ROOM,
    {
        "ad_psgd": f"{_ROOM}.ad_psgd:ADPSGD",
        "aggregated": f"{_ROOM}.aggregated:Aggregated",
        "central_storage": f"{_ROOM}.central_storage:CentralStorage",
        "context_parallel": f"{_ROOM}.context_parallel:ContextParallel",
        "downpour": f"{_ROOM}.downpour:Downpour",
        "expert_parallel": f"{_ROOM}.expert_parallel:ExpertParallel",
        "fully_sharded": f"{_ROOM}.fully_sharded:FullySharded",
        "gossip": f"{_ROOM}.gossip:Gossip",
        "hogwild": f"{_ROOM}.hogwild:Hogwild",
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
    base=f"{_ROOM}.strategy:Strategy",
)
"""Every strategy by its name."""

SHORT_NAMES: Registry[Callable[..., Strategy]] = Registry(
    "",
    {
        "diloco": f"{_ROOM}.local_steps:DiLoCo",
        "easgd": f"{_ROOM}.local_steps:EASGD",
        "fed_avg": f"{_ROOM}.local_steps:FedAvg",
        "fed_prox": f"{_ROOM}.local_steps:FedProx",
        "local_adam": f"{_ROOM}.local_steps:LocalAdam",
        "local_sgd": f"{_ROOM}.local_steps:LocalSGD",
        "multi_worker_mirrored": f"{_ROOM}.mirrored:MultiWorkerMirrored",
    },
)
"""Other names of strategies, some with other numbers; plans and events say the strategy's own."""

_ELSEWHERE: Mapping[str, str] = {
    "accelerate": "mirrored",
    "async_sgd": "parameter_server",
    "cp": "context_parallel",
    "data_parallel": "mirrored",
    "ddp": "mirrored",
    "deepspeed": "fully_sharded",
    "distributed_data_parallel": "mirrored",
    "dp": "mirrored",
    "ep": "expert_parallel",
    "fsdp": "fully_sharded",
    "fsdp2": "fully_sharded",
    "gpipe": "pipeline",
    "horovod": "mirrored",
    "megatron": "tensor_parallel",
    "pipe": "pipeline",
    "pipeline_parallel": "pipeline",
    "pp": "pipeline",
    "ps": "parameter_server",
    "single_device": "one_device",
    "sync_sgd": "mirrored",
    "tp": "tensor_parallel",
    "zero": "fully_sharded",
    "zero1": "fully_sharded",
    "zero2": "fully_sharded",
    "zero3": "fully_sharded",
}
"""What other systems call a strategy, without case, hyphens and an ending."""


def unknown_strategy(name: str) -> UnknownName:
    """Returns the error for a name that is none; it names ours where another system has the name."""
    known = (*STRATEGIES, *SHORT_NAMES)
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower().replace("-", "_").replace(" ", "_")
    plain = plain.removesuffix("_strategy").removesuffix("_plugin").removesuffix("_parallel_v2")
    short = name.lower().removesuffix("strategy")
    ours = next((each for each in (plain, short) if each in known), "")
    ours = ours or _ELSEWHERE.get(plain, "") or _ELSEWHERE.get(plain.replace("_", ""), "")
    return UnknownName("strategy", name, known, hint=f"`{name}` is `{ours}` here" if ours else "")
