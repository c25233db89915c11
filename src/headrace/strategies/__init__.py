"""ONE FILE = ONE STRATEGY. To add one, copy `one_device.py`, fill its three methods and add a line here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from headrace.errors import UnknownName, UsageError
from headrace.strategies.central_storage import CentralStorage
from headrace.strategies.downpour import Downpour
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.one_device import OneDevice
from headrace.strategies.parameter_server import ParameterServer
from headrace.strategies.strategy import Parts, Strategy
from headrace.strategies.unconnected import Unconnected

__all__ = [
    "STRATEGIES",
    "CentralStorage",
    "Downpour",
    "Mirrored",
    "OneDevice",
    "ParameterServer",
    "Parts",
    "Strategy",
    "Unconnected",
    "resolve",
]

STRATEGIES: Mapping[str, type[Strategy]] = {
    "central_storage": CentralStorage,
    "downpour": Downpour,
    "mirrored": Mirrored,
    "one_device": OneDevice,
    "parameter_server": ParameterServer,
    "unconnected": Unconnected,
}
"""Every strategy by its name."""


def resolve(strategy: str | Strategy, workers: int | None = None) -> Strategy:
    """Returns the strategy of that name, with that many workers where it takes a number of them.

    Raises:
        UnknownName: there is none of that name.
        UsageError: it is neither a name nor a strategy.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise UsageError(f"a strategy is a name ('mirrored') or hr.Mirrored(...), got {strategy!r}")
    if strategy not in STRATEGIES:
        raise UnknownName("strategy", strategy, STRATEGIES)
    kind: Callable[..., Strategy] = STRATEGIES[strategy]
    takes_workers = "workers" in inspect.signature(kind).parameters
    return kind(workers=workers) if takes_workers and workers is not None else kind()
