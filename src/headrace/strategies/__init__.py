"""ONE FILE = ONE STRATEGY. To add one, copy `one_device.py`, write its two methods and add a line to `table.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.registry import lazy_names
from headrace.strategies.table import SHORT_NAMES, STRATEGIES

if TYPE_CHECKING:
    from headrace.strategies.ad_psgd import ADPSGD
    from headrace.strategies.aggregated import Aggregated
    from headrace.strategies.central_storage import CentralStorage
    from headrace.strategies.checks import COUNTS
    from headrace.strategies.context import WorkerContext
    from headrace.strategies.context_parallel import ContextParallel
    from headrace.strategies.downpour import Downpour
    from headrace.strategies.expert_parallel import ExpertParallel
    from headrace.strategies.fully_sharded import FullySharded
    from headrace.strategies.gossip import Gossip
    from headrace.strategies.hogwild import Hogwild
    from headrace.strategies.hybrid import Hybrid
    from headrace.strategies.local_steps import EASGD, DiLoCo, FedAvg, FedProx, LocalAdam, LocalSGD
    from headrace.strategies.mirrored import Mirrored, MultiWorkerMirrored
    from headrace.strategies.one_device import OneDevice
    from headrace.strategies.parameter_averaging import ParameterAveraging
    from headrace.strategies.parameter_server import ParameterServer
    from headrace.strategies.pipeline import Pipeline
    from headrace.strategies.resolving import made_again, resolve
    from headrace.strategies.sandblaster import Sandblaster
    from headrace.strategies.strategy import Strategy
    from headrace.strategies.tensor_parallel import TensorParallel
    from headrace.strategies.tpu import TPU
    from headrace.strategies.unconnected import Unconnected

__all__ = [
    "ADPSGD",
    "COUNTS",
    "EASGD",
    "SHORT_NAMES",
    "STRATEGIES",
    "TPU",
    "Aggregated",
    "CentralStorage",
    "ContextParallel",
    "DiLoCo",
    "Downpour",
    "ExpertParallel",
    "FedAvg",
    "FedProx",
    "FullySharded",
    "Gossip",
    "Hogwild",
    "Hybrid",
    "LocalAdam",
    "LocalSGD",
    "Mirrored",
    "MultiWorkerMirrored",
    "OneDevice",
    "ParameterAveraging",
    "ParameterServer",
    "Pipeline",
    "Sandblaster",
    "Strategy",
    "TensorParallel",
    "Unconnected",
    "WorkerContext",
    "made_again",
    "resolve",
]

__getattr__ = lazy_names(
    __name__,
    {
        "COUNTS": "headrace.strategies.checks:COUNTS",
        "Strategy": "headrace.strategies.strategy:Strategy",
        "WorkerContext": "headrace.strategies.context:WorkerContext",
        "made_again": "headrace.strategies.resolving:made_again",
        "resolve": "headrace.strategies.resolving:resolve",
    },
    STRATEGIES,
    SHORT_NAMES,
)


def __dir__() -> list[str]:
    return __all__
