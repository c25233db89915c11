"""A module whose forward runs several times, each time from the same attributes and buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace import internals
from headrace.modules import stateful_modules, without_data


class Isolation:
    """Gives a module's attributes, buffers and extra state back as they were, between the runs of stages."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(part, dict(vars(part))) for part in module.modules()]
        self._held = [(internals.buffers(part), dict(internals.buffers(part))) for part in self._plain(module)]
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._states = [(part, copy.deepcopy(part.get_extra_state())) for _, part in stateful_modules(module)]
        named = (*module.named_parameters(), *module.named_buffers())
        self._names = {id(tensor): name for name, tensor in named}
        self._empty = {id(tensor): without_data(tensor) for _, tensor in named if tensor.layout is torch.strided}
        self._module = module

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Gives attributes and buffers back afterwards."""
        try:
            yield
        finally:
            for part, attributes in self._attributes:
                vars(part).clear()
                vars(part).update(attributes)
            for part, state in self._states:
                part.set_extra_state(copy.deepcopy(state))
            for buffers, held in self._held:
                buffers.update(held)
            with torch.no_grad():
                for buffer, was in self._buffers:
                    buffer.copy_(was)

    @contextmanager
    def released(self, held: set[str]) -> Iterator[None]:
        """Leaves no data in the parameters and buffers that are not held."""
        changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for part in self._plain(self._module):
            held_here: tuple[dict[str, Any], ...] = internals.parameters(part), internals.buffers(part)
            for tensors in held_here:
                changed.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    if tensor is not None and self._names.get(id(tensor)) not in held:
                        tensors[name] = self._empty.get(id(tensor), tensor)
        try:
            yield
        finally:
            for tensors, before in changed:
                tensors.update(before)

    def _plain(self, module: nn.Module) -> list[nn.Module]:
        """Returns the modules whose tensors can be replaced."""
        return [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
