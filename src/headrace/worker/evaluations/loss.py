"""A job's loss that is a part of the model: one that is a module with parameters or buffers of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace import internals
from headrace.modules import copy_module

LOSS = "headrace_loss"
"""The name, in the model, of a loss that is trained with it."""


@dataclass(frozen=True)
class LossOfModel:
    """A job's loss that is a module with parameters or buffers: a part of the model, trained and saved with it."""

    module: nn.Module

    def __call__(self, output: Any, target: Any) -> Any:
        return self.module(output, target)


class _Aside:
    """Takes the loss out of a model while its forward runs, which may call all children, as that of a Sequential."""

    def __init__(self) -> None:
        self._taken: list[nn.Module | None] = []

    def take(self, module: nn.Module, inputs: Any) -> None:
        """Goes before forward."""
        self._taken.append(internals.children(module).pop(LOSS, None))

    def put(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Goes after it."""
        if (loss := self._taken.pop()) is not None:
            internals.children(module)[LOSS] = loss


def with_loss(module: nn.Module, loss: Any) -> nn.Module:
    """Makes a copy of a loss that is a part of the model a part of one; returns the model."""
    if isinstance(loss, LossOfModel):
        module.add_module(LOSS, copy_module(loss.module))
        aside = _Aside()
        module.register_forward_pre_hook(aside.take, prepend=True)
        module.register_forward_hook(aside.put, always_call=True)
    return module


def loss_in(module: nn.Module, loss: Any) -> Any:
    """Returns a job's loss, or the part of a model that it is."""
    return internals.children(module)[LOSS] if isinstance(loss, LossOfModel) else loss


def without_loss(module: nn.Module) -> nn.Module | None:
    """Takes the loss out of a model, and returns it, if there is one."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    for hooks in (internals.forward_pre_hooks(module), internals.forward_hooks(module)):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Aside)]:
            del hooks[key]
    loss: nn.Module | None = internals.children(module).pop(LOSS, None)
    return loss
