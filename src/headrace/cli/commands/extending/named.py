"""What a user names on the command line besides strategies: data, metrics, callbacks and trackers.

A name is this package's, that of an entry point of another one, or a place ("mine.py:Squares"), with values if it takes
some: `mine.py:Squares(1000)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.errors import HeadraceError, UnknownName, UsageError, in_one_line
from headrace.registry import Registry
from headrace.spec.call import Call, parse_call, split_calls

_METRICS = ("absolute_error", "accuracy", "binary_accuracy", "exact_match", "squared_error", "top_k_accuracy")
_TRACKERS = {"mlflow": "mlflow:MLflow", "tensorboard": "tensorboard:TensorBoard", "wandb": "wandb:WandB"}

CALLBACKS: Registry[Any] = Registry("headrace.callbacks", {})
METRICS: Registry[Any] = Registry("headrace.metrics", {name: f"headrace.metrics:{name}" for name in _METRICS})
SOURCES: Registry[Any] = Registry("headrace.sources", {})
TRACKERS: Registry[Any] = Registry(
    "headrace.trackers", {name: f"headrace.report.trackers.{place}" for name, place in _TRACKERS.items()}
)


def made(kind: str, table: Registry[Any], text: str, calls: bool = False) -> Any:
    """Returns what a name makes: an object of a class, else what is there, with the given values when it is called.

    Args:
        kind: what it is to be, for a message.
        calls: whether a function is called, too.

    Raises:
        UsageError: there is none of this name, or it does not take these values.
    """
    call = parse_call(text)
    if call.name not in table:
        raise UnknownName(kind, call.name, table, hint="" if len(table) else "write it as file.py:Name")
    thing = table[call.name]
    for value in (*call.values, *call.options.values()):
        if isinstance(value, Call):
            raise UsageError(f"{text}: a text takes quotes, '{value.name}'")
    if isinstance(thing, type) or (calls and inspect.isroutine(thing)):
        return _called(thing, call)
    if not (call.values or call.options):
        return thing
    if not callable(thing):
        raise UsageError(f"{call.name} is {thing!r:.60}, and takes no values; leave out ({text.partition('(')[2]}")
    return partial(thing, *call.values, **call.options)


def _called(thing: Callable[..., Any], call: Call) -> Any:
    try:
        inspect.signature(thing).bind(*call.values, **call.options)
    except TypeError as error:
        raise UsageError(
            f"{call.name} takes {inspect.signature(thing)}: {error}; write it as {call.name}(...)"
        ) from None
    except ValueError:
        # Of a class of C there is no signature.
        pass
    try:
        return thing(*call.values, **call.options)
    except HeadraceError:
        raise
    except Exception as error:
        raise UsageError(f"{call.name} cannot be made: {in_one_line(error)}") from error


def metrics(text: str) -> Mapping[str, Callable[..., Any]]:
    """Returns metrics by name: "accuracy, best=mine.py:top(k=1)".

    Raises:
        UsageError: there is none of this name, it is no function, or two have one name.
    """
    found: dict[str, Callable[..., Any]] = {}
    for part in split_calls(text):
        name, equals, rest = part.partition("=")
        named = bool(equals) and name.strip().isidentifier()
        metric = made("metric", METRICS, rest.strip() if named else part)
        name = name.strip() if named else parse_call(part).name.rpartition(":")[2]
        if not callable(metric):
            raise UsageError(f"{part} is {metric!r:.60}, and a metric is a function of (output, target)")
        if name in found:
            raise UsageError(f"two metrics are called {name}; give one another name: {name}_2={part}")
        found[name] = metric
    return found
