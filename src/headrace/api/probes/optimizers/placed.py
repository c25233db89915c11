"""Does the state that an optimizer's constructor makes go by where an element is in its parameter?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.training.optimizer import state_stores
from headrace.trees import tensors_of

_Build = Callable[[Mapping[str, Tensor]], torch.optim.Optimizer]


def goes_by_place(build: _Build, values: Mapping[str, Tensor]) -> bool:
    """Compares the state that it makes for a corner of each parameter with that corner of the state of the whole.

    `build` makes it over parameters of these values, by name.
    """
    whole = _states(build(values), values)
    # Most make none.
    return bool(whole) and any(
        name not in whole or not _same(whole[name], each, _corner(values[name[0]]))
        for name, each in _states(build({name: each[_corner(each)] for name, each in values.items()}), values).items()
    )


def _corner(value: Tensor) -> tuple[slice, ...]:
    return tuple(slice(length // 2, None) for length in value.shape)


def _states(optimizer: torch.optim.Optimizer, tried: Mapping[str, Tensor]) -> dict[tuple[str, str, int], Tensor]:
    """Returns the tensors of the tried parameters' state: by parameter, store and number."""
    groups = optimizer.param_groups
    names = {id(each): name for own in groups for name, each in zip(own["param_names"], own["params"], strict=True)}
    return {
        (names[id(tensor)], prefix, number): each
        for prefix, store in state_stores(optimizer)
        for tensor, state in store.items()
        if names.get(id(tensor)) in tried
        for number, each in enumerate(tensors_of(state))
    }


def _same(whole: Tensor, part: Tensor, corner: tuple[slice, ...]) -> bool:
    # What has another shape is no value of each element.
    cut = whole[corner] if whole.dim() == len(corner) and whole.dim() else whole
    return cut.shape == part.shape and torch.equal(cut, part)
