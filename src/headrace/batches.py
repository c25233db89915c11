"""What of a batch goes to the model, and what to the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.errors import DataError, JobError
from headrace.trees import map_tensors


def call(module: Callable[..., Any], batch: Any, inputs: Any) -> Any:
    """Runs the model, or a compiled form of it, on the part of a batch that `Job.inputs` selects.

    Of several entries, those of a tuple become positional arguments, and those of a dict keywords.
    """
    if callable(inputs):
        return module(inputs(batch))
    if inputs is None:
        if isinstance(batch, Mapping):
            return module(**batch)
        return module(batch[0] if isinstance(batch, tuple | list) else batch)
    keys = inputs if isinstance(inputs, tuple | list) else (inputs,)
    try:
        chosen = [(key, batch[key]) for key in keys]
    except (KeyError, IndexError, TypeError) as error:
        raise JobError(f"inputs={inputs!r} does not fit a batch that is {form(batch)}") from error
    if keys is not inputs:
        return module(chosen[0][1])
    places = [value for key, value in chosen if isinstance(key, int)]
    return module(*places, **{key: value for key, value in chosen if not isinstance(key, int)})


def arguments(batch: Any, inputs: Any) -> str:
    """Tells what `call` gives a model of a batch, for an error."""

    def told(*places: Any, **keywords: Any) -> str:
        return ", ".join([*map(form, places), *(f"{key}=..." for key in keywords)])

    return str(call(told, batch, inputs))


def select_target(batch: Any, target: Any) -> Any:
    """Returns the part of a batch that `Job.target` selects for the loss."""
    if callable(target):
        return target(batch)
    if target is None:
        return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    try:
        return batch[target]
    except (KeyError, IndexError, TypeError) as error:
        raise JobError(f"target={target!r} does not fit a batch that is {form(batch)}") from error


def examples_of(batch: Any) -> int:
    """Returns the length of the first tensor in a batch that has a dim; of its first list of texts if there is none."""
    columns = list(_columns(batch))
    if not columns:
        raise DataError(
            f"a batch that is {form(batch)} has neither a tensor nor a list of texts, with one entry for each example, "
            "by which its examples could be counted; let the data have one"
        )
    return len(next((column for column in columns if isinstance(column, Tensor)), columns[0]))


def _columns(tree: Any) -> Iterator[Tensor | list[Any]]:
    if isinstance(tree, Tensor):
        if tree.dim():
            yield tree
    elif isinstance(tree, list) and tree and all(isinstance(item, str | bytes) for item in tree):
        yield tree
    elif isinstance(tree, Mapping | tuple | list):
        for child in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _columns(child)


def form(batch: Any) -> str:
    """Tells what kind of thing a batch, or a part of it, is."""
    if isinstance(batch, Mapping):
        return f"a dict with the keys {sorted(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


def placed(batch: Any, device: torch.device) -> Any:
    """Returns a batch on a device."""
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
