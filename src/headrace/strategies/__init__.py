"""ONE FILE = ONE STRATEGY. To add one, copy `one_device.py`, fill its three methods and add a line here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from headrace.errors import UnknownName, UsageError
from headrace.spec.call import parse_call
from headrace.strategies.central_storage import CentralStorage
from headrace.strategies.downpour import Downpour
from headrace.strategies.hybrid import Hybrid
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.one_device import OneDevice
from headrace.strategies.parameter_averaging import EASGD, DiLoCo, LocalSGD, ParameterAveraging
from headrace.strategies.parameter_server import ParameterServer
from headrace.strategies.pipeline import Pipeline
from headrace.strategies.strategy import Parts, Strategy
from headrace.strategies.tensor_parallel import TensorParallel
from headrace.strategies.unconnected import Unconnected

__all__ = [
    "COUNTS",
    "EASGD",
    "SHORT_NAMES",
    "STRATEGIES",
    "CentralStorage",
    "DiLoCo",
    "Downpour",
    "Hybrid",
    "LocalSGD",
    "Mirrored",
    "OneDevice",
    "ParameterAveraging",
    "ParameterServer",
    "Parts",
    "Pipeline",
    "Strategy",
    "TensorParallel",
    "Unconnected",
    "resolve",
]

STRATEGIES: Mapping[str, type[Strategy]] = {
    "central_storage": CentralStorage,
    "downpour": Downpour,
    "hybrid": Hybrid,
    "mirrored": Mirrored,
    "one_device": OneDevice,
    "parameter_averaging": ParameterAveraging,
    "parameter_server": ParameterServer,
    "pipeline": Pipeline,
    "tensor_parallel": TensorParallel,
    "unconnected": Unconnected,
}
"""Every strategy by its name."""

SHORT_NAMES: Mapping[str, Callable[..., Strategy]] = {"diloco": DiLoCo, "easgd": EASGD, "local_sgd": LocalSGD}
"""Names of strategies with other numbers; plans and events say the strategy's own."""

COUNTS = ("workers", "stages", "devices")
"""What strategies call the option that says how many ranks compute."""


def resolve(strategy: str | Strategy, workers: int | None = None) -> Strategy:
    """Returns a strategy by its name, with options if they are given: "mirrored", "downpour(push_every=2)".

    Args:
        strategy: the name, or a strategy already.
        workers: how many, or stages, where it takes a number of them and its options say none.

    Raises:
        UnknownName: there is none of that name, or it has no such option.
        UsageError: it is neither a name nor a strategy.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise UsageError(f"a strategy is a name ('mirrored') or hr.Mirrored(...), got {strategy!r}")
    name, options = parse_call(strategy)
    kinds: Mapping[str, Callable[..., Strategy]] = {**STRATEGIES, **SHORT_NAMES}
    if name not in kinds:
        raise UnknownName("strategy", name, kinds)
    kind = kinds[name]
    known = inspect.signature(kind).parameters
    for option in options:
        if option not in known:
            raise UnknownName(f"option of {name}", option, known)
    for option in COUNTS:
        if workers is not None and option in known:
            options.setdefault(option, workers)
    if kind is Hybrid:
        options = {option: resolve(value) if isinstance(value, str) else value for option, value in options.items()}
    return kind(**options)
