"""ONE FILE = ONE STRATEGY. To add one, copy `one_device.py`, write its two methods and add a line here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from headrace.errors import UnknownName, UsageError
from headrace.spec.call import Call, parse_call
from headrace.strategies.central_storage import CentralStorage
from headrace.strategies.checks import COUNTS
from headrace.strategies.context import WorkerContext
from headrace.strategies.downpour import Downpour
from headrace.strategies.fully_sharded import FullySharded
from headrace.strategies.gossip import Gossip
from headrace.strategies.hybrid import Hybrid
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.one_device import OneDevice
from headrace.strategies.parameter_averaging import EASGD, DiLoCo, LocalSGD, ParameterAveraging
from headrace.strategies.parameter_server import ParameterServer
from headrace.strategies.pipeline import Pipeline
from headrace.strategies.sandblaster import Sandblaster
from headrace.strategies.strategy import Strategy, describe_options
from headrace.strategies.tensor_parallel import TensorParallel
from headrace.strategies.tpu import TPU
from headrace.strategies.unconnected import Unconnected

__all__ = [
    "COUNTS",
    "EASGD",
    "SHORT_NAMES",
    "STRATEGIES",
    "TPU",
    "CentralStorage",
    "DiLoCo",
    "Downpour",
    "FullySharded",
    "Gossip",
    "Hybrid",
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

STRATEGIES: Mapping[str, type[Strategy]] = {
    "central_storage": CentralStorage,
    "downpour": Downpour,
    "fully_sharded": FullySharded,
    "gossip": Gossip,
    "hybrid": Hybrid,
    "mirrored": Mirrored,
    "one_device": OneDevice,
    "parameter_averaging": ParameterAveraging,
    "parameter_server": ParameterServer,
    "pipeline": Pipeline,
    "sandblaster": Sandblaster,
    "tensor_parallel": TensorParallel,
    "tpu": TPU,
    "unconnected": Unconnected,
}
"""Every strategy by its name."""

MultiWorkerMirrored = Mirrored
"""TensorFlow's name for what `Mirrored` is over several hosts."""

SHORT_NAMES: Mapping[str, Callable[..., Strategy]] = {
    "diloco": DiLoCo,
    "easgd": EASGD,
    "local_sgd": LocalSGD,
    "multi_worker_mirrored": MultiWorkerMirrored,
}
"""Other names of strategies, some with other numbers; plans and events say the strategy's own."""


def resolve(strategy: str | Strategy, workers: int | None = None) -> Strategy:
    """Returns a strategy by its name, with options if they are given: "mirrored", "downpour(push_every=2)".

    Args:
        strategy: the name, or a strategy already.
        workers: how many, or stages, where it takes a number of them and its options say none.

    Raises:
        UnknownName: there is none of that name, or it has no such option.
        UsageError: it is neither a name nor a strategy, or has a value too many, or twice.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise UsageError(f"a strategy is a name ('mirrored') or hr.Mirrored(...), got {strategy!r}")
    return _made(parse_call(strategy), workers)


def made_again(name: str, options: Mapping[str, object], workers: int) -> Strategy:
    """Returns the strategy of a plan, which had so many workers.

    Raises:
        UsageError: it is unknown here, or has options that a plan does not say.
    """
    kind = STRATEGIES.get(name)
    if kind is None:
        raise UsageError(f"its strategy is {name}, which is unknown here")
    plain = {option: value for option, value in options.items() if not isinstance(value, Mapping)}
    plain |= {option: workers for option in COUNTS if option in plain and plain[option] is None}
    try:
        strategy = kind(**plain)
        described = describe_options(strategy)
        if all(described[option] == value for option, value in options.items() if isinstance(value, Mapping)):
            return strategy
    except TypeError:
        # One of an option's values is no plain one, and has no default: a strategy within a strategy.
        pass
    raise UsageError(f"{name} has options that cannot be made again from its plan; give the strategy itself")


def _made(call: Call, workers: int | None) -> Strategy:
    kinds: Mapping[str, Callable[..., Strategy]] = {**STRATEGIES, **SHORT_NAMES}
    if call.name not in kinds:
        raise UnknownName("strategy", call.name, kinds)
    kind = kinds[call.name]
    known = inspect.signature(kind).parameters
    options = _options(call, list(known))
    for option in COUNTS:
        if workers is not None and option in known:
            options.setdefault(option, workers)
    lacking = [name for name, each in known.items() if each.default is each.empty and name not in options]
    if lacking:
        raise UsageError(f"{call.name} needs {' and '.join(lacking)}; write it as {call.name}({', '.join(known)})")
    for option, value in options.items():
        if kind is Hybrid:
            options[option] = _made(value, None) if isinstance(value, Call) else resolve(value)  # type: ignore[arg-type]
        elif isinstance(value, Call):
            raise UsageError(f"{option} of {call.name} is no strategy: a text takes quotes, {option}='{value.name}'")
    return kind(**options)


def _options(call: Call, known: Sequence[str]) -> dict[str, object]:
    """Returns all values of a call with their names."""
    if len(call.values) > len(known):
        raise UsageError(f"{call.name} takes {len(known)} options, got {len(call.values)}: {', '.join(known)}")
    options = dict(zip(known, call.values, strict=False))
    for option, value in call.options.items():
        if option not in known:
            raise UnknownName("option", option, known, call.name)
        if option in options:
            raise UsageError(f"{call.name} gets {option} twice: {options[option]!r} and {value!r}")
        options[option] = value
    return options
