"""What a frozen parameter is besides its values, which `fully_shard` would lose: its class, and its attributes.

A weight in 4 bits has its scales there. They stay whole, on every rank, and a gathered weight has them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from headrace import internals
from headrace.modules import replace_tensors


class FrozenForms:
    """The frozen parameters of a module that have a class or attributes of their own, before they are divided."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forms: dict[str, tuple[Any, dict[str, Any]]] = {
            name: (type(each), dict(vars(each)))
            for name, each in module.named_parameters()
            if not each.requires_grad and (type(each) is not nn.Parameter or vars(each))
        }

    def take_off(self, names: Sequence[str]) -> None:
        """Makes frozen ones of such names plain parameters, and all of them contiguous, so that they can be divided."""
        for parameter in map(self._module.get_parameter, names):
            parameter.data = parameter.data.contiguous()
        # What a class does when it is cut is not for parts of ranks.
        own = {id(each): nn.Parameter(each.data.as_subclass(Tensor), False) for _, each in self._those(names)}
        replace_tensors(self._module, own)

    def carry(self, names: Sequence[str]) -> None:
        """Gives the divided ones their attributes, which a module asks for where it writes its state."""
        for name, each in self._those(names):
            vars(each).update(self._forms[name][1])

    def put_on(self, unit: nn.Module, names: Sequence[str]) -> None:
        """Gives what is gathered of a unit, now and later, its class and attributes."""
        made: dict[int, Any] = {}
        for name, each in self._those(names):
            kind, attributes = self._forms[name]
            # In the same memory.
            whole = made[id(each)] = each.detach().as_subclass(kind)
            whole.requires_grad_(False)
            vars(whole).update(attributes)
        internals.replace_gathered(unit, made)

    def _those(self, names: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
        return [(name, self._module.get_parameter(name)) for name in names if name in self._forms]
