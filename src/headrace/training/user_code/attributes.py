"""What an optimizer keeps in its attributes: saved with its state, and set when that is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from headrace.errors import UsageError
from headrace.training.optimizer import nested
from headrace.trees import plain, restored


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns numbers and texts that an optimizer keeps in attributes, or for no parameter, as JSON values."""
    found: dict[str, Any] = {}
    updated = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for prefix, each in nested(optimizer).items():
        named = {name: value for name, value in vars(each).items() if not _is_torchs(each, name)}
        named = {name: value for name, value in named.items() if not _refers(value, updated)}
        named |= {f"state[{key}]": value for key, value in each.state.items() if isinstance(key, str)}
        for name, value in named.items():
            with suppress(UsageError):
                found[f"{prefix}{name}"] = plain(value, name)
    return found


def _refers(value: Any, updated: set[int]) -> bool:
    """Tells whether a value has some of the optimizer's parameters, which it must go on to refer to."""
    if isinstance(value, dict):
        return any(_refers(each, updated) for each in value.values())
    return any(_refers(each, updated) for each in value) if isinstance(value, list | tuple) else id(value) in updated


def set_attributes(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Sets what `attributes` returned."""
    every = nested(optimizer)
    for path, value in values.items():
        prefix = max((each for each in every if path.startswith(each)), key=len)
        name, place = path.removeprefix(prefix), every[prefix]
        if name.startswith("state["):
            store: Any = place.state
            store[name[len("state[") : -1]] = restored(value)
        elif not _is_torchs(place, name) and not callable(getattr(type(place), name, None)):
            vars(place)[name] = restored(value)


def _is_torchs(optimizer: torch.optim.Optimizer, name: str) -> bool:
    own = name.startswith("_") and type(optimizer).__module__.startswith("torch.optim")
    return own or name in _torchs_attributes()


@cache
def _torchs_attributes() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
