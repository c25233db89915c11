"""The models of torch's own layers that look at each example alone and change nothing: they need no trial."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from headrace.api.probes.parts.split_loss import is_ours
from headrace.internals import hooks_of_all_modules, module_hooks
from headrace.training.user_code.objective import Objective

LAYERS = (
    nn.Sequential,
    nn.Identity,
    nn.Flatten,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
)


def is_known(module: nn.Module, objective: Objective) -> bool:
    """Tells whether a model has such layers alone, and its loss is a task's, which is a mean over examples."""
    own = objective.model is not None or not is_ours(objective.loss)
    if own or callable(objective.inputs) or callable(objective.target) or hooks_of_all_modules():
        return False
    plain = all(type(each) is nn.Parameter and not each.is_meta for each in module.parameters())
    return plain and not list(module.buffers()) and all(map(_is_known_layer, module.modules()))


def _is_known_layer(part: nn.Module) -> bool:
    if type(part) not in LAYERS or module_hooks(part) or "forward" in vars(part):
        return False
    if isinstance(part, nn.Flatten) and part.start_dim < 1:
        return False
    # The caller's program may have replaced functions of torch.
    own: list[Any] = [type(part).__call__, type(part).forward]
    own += [vars(type(part))[name] for name in type(part).forward.__code__.co_names if name in vars(type(part))]
    spaces = vars(functional), vars(torch)
    called = [space.get(name) for each in own for name in _names(each) for space in spaces]
    return all(map(_is_of_torch, [*own, *filter(callable, called)]))


def _names(function: Any) -> tuple[str, ...]:
    return function.__code__.co_names if inspect.isfunction(function) else ()


def _is_of_torch(function: Any) -> bool:
    if inspect.isfunction(function):
        return Path(torch.__file__).parent in Path(function.__code__.co_filename).parents
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0] in ("torch", "builtins", "math")
