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


def with_loss(module: nn.Module, loss: Any) -> nn.Module:
    """Makes a copy of a loss that is a part of the model a part of one; returns the model."""
    if isinstance(loss, LossOfModel):
        module.add_module(LOSS, copy_module(loss.module))
    return module


def loss_in(module: nn.Module, loss: Any) -> Any:
    """Returns a job's loss, or the part of a model that it is."""
    return internals.children(module)[LOSS] if isinstance(loss, LossOfModel) else loss


def without_loss(module: nn.Module) -> nn.Module | None:
    """Takes the loss out of a model, and returns it, if there is one."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    loss: nn.Module | None = internals.children(module).pop(LOSS, None)
    return loss
