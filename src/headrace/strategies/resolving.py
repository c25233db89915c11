"""Strategies by what a user or a plan calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from headrace.errors import UnknownName, UsageError
from headrace.spec.call import Call, parse_call
from headrace.strategies.checks import COUNTS
from headrace.strategies.strategy import Strategy, describe_options
from headrace.strategies.table import SHORT_NAMES, STRATEGIES, unknown_strategy


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
    kinds: Mapping[str, Callable[..., Strategy]] = SHORT_NAMES if call.name in SHORT_NAMES else STRATEGIES
    if call.name not in kinds:
        raise unknown_strategy(call.name)
    kind = kinds[call.name]
    # Of a hybrid, further levels than its two options.
    inside = call.values[2:] if call.name == "hybrid" else ()
    call = call._replace(values=call.values[: len(call.values) - len(inside)])
    signature = inspect.signature(kind).parameters
    known = {name: each for name, each in signature.items() if each.kind is not each.VAR_POSITIONAL}
    options = _options(call, list(known))
    for option in COUNTS:
        if workers is not None and option in known:
            options.setdefault(option, workers)
    lacking = [name for name, each in known.items() if each.default is each.empty and name not in options]
    if lacking:
        raise UsageError(f"{call.name} needs {' and '.join(lacking)}; write it as {call.name}({', '.join(known)})")
    if call.name == "hybrid":
        levels = *(options[name] for name in known), *inside
        return kind(*(_made(each, None) if isinstance(each, Call) else resolve(each) for each in levels))  # type: ignore[arg-type]
    for option, value in options.items():
        if isinstance(value, Call):
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
