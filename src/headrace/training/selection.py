"""Which part of a batch the model gets, and which the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from headrace.errors import JobError


def call(module: Callable[..., Any], batch: Any, inputs: Any) -> Any:
    """Runs the model on its part of a batch.

    Args:
        module: the model, or a compiled form of it.
        batch: what the data gave.
        inputs: `Job.inputs`.
    """
    if callable(inputs):
        return module(inputs(batch))
    if inputs is None:
        if isinstance(batch, Mapping):
            return module(**batch)
        return module(batch[0] if isinstance(batch, tuple | list) else batch)
    try:
        if isinstance(inputs, tuple | list):
            return module(**{key: batch[key] for key in inputs})
        chosen = batch[inputs]
    except (KeyError, IndexError, TypeError) as error:
        raise JobError(f"inputs={inputs!r} does not fit a batch that is {_form(batch)}") from error
    return module(chosen)


def select_target(batch: Any, target: Any) -> Any:
    """Returns what the loss compares the output with, by `Job.target`."""
    if callable(target):
        return target(batch)
    if target is None:
        return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    try:
        return batch[target]
    except (KeyError, IndexError, TypeError) as error:
        raise JobError(f"target={target!r} does not fit a batch that is {_form(batch)}") from error


def examples_of(batch: Any) -> int:
    """Returns the length of the first tensor found in a batch."""
    if isinstance(batch, Tensor):
        return len(batch)
    children = batch.values() if isinstance(batch, Mapping) else batch
    return next(examples_of(child) for child in children)


def _form(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with the keys {sorted(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"
