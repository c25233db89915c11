"""What forward keeps for backward, kept in pinned host memory meanwhile.

    forward    result ─► pinned copy on the host          backward    pinned copy ─► device ─► gradient

It does what `torch.autograd.graph.save_on_cpu(pin_memory=True)` does, except for what stays on the device anyway:
parameters, buffers, and what is small or repeats the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headrace import internals
from headrace.devices import HOST
from headrace.modules import memory_of

_LEAST_BYTES = 1 << 10
"""Of what is copied: for less, a copy takes longer than it saves memory."""


def pinned(tensor: Tensor) -> Tensor | None:
    """Returns a copy in pinned host memory; None of what is on the host."""
    if tensor.device.type == HOST:
        return None
    # In the same order of memory, by which kernels choose how they compute.
    there = torch.empty_like(tensor, device=HOST, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def _back(saved: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = saved
    return tensor.to(device, non_blocking=True)


class OffloadedForward:
    """Stands in the place of a module's `forward`, whose activations go to the host.

    `copy` returns what is there instead of a tensor, or None where that stays; `back` is given it with the device.
    """

    __slots__ = ("_back", "_copy", "_forward", "_module")

    def __init__(
        self,
        module: nn.Module,
        copy: Callable[[Tensor], Tensor | None] = pinned,
        back: Callable[[tuple[torch.device, Tensor]], Tensor] = _back,
    ) -> None:
        self._module, self._copy, self._back = module, copy, back
        self._forward: Any = module.forward
        vars(module)["forward"] = self

    def __call__(self, *values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*values, **named)
        stays = {memory_of(each) for each in (*self._module.parameters(), *self._module.buffers())}

        def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
            copied = self._copy(tensor) if _moves(tensor) and memory_of(tensor) not in stays else None
            return tensor.device, tensor if copied is None else copied

        with saved_tensors_hooks(to_host, self._back):
            return self._forward(*values, **named)


def _moves(tensor: Tensor) -> bool:
    """Whether a tensor that is saved may go to the host."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    # A unit of fully_sharded is whole for a while alone, and its views come and go with it.
    if isinstance(internals.base(tensor), nn.Parameter):
        return False
    return _LEAST_BYTES <= tensor.nbytes <= tensor.untyped_storage().nbytes()
