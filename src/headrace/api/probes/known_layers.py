"""The models of torch's own layers that look at each example alone and change nothing: they need no trial."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import partial
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
    loss = objective.loss.func if isinstance(objective.loss, partial) else objective.loss
    plain = all(type(each) is nn.Parameter and not each.is_meta for each in module.parameters())
    plain = plain and not list(module.buffers()) and _calls_torch(vars(sys.modules[loss.__module__]).values())
    return plain and all(map(_is_known_layer, module.modules()))


def _is_known_layer(part: nn.Module) -> bool:
    if type(part) not in LAYERS or module_hooks(part) or "forward" in vars(part):
        return False
    if isinstance(part, nn.Flatten) and part.start_dim < 1:
        return False
    own: list[Any] = [type(part).__call__, type(part).forward]
    own += [vars(type(part))[name] for name in type(part).forward.__code__.co_names if name in vars(type(part))]
    return all(map(_is_of_torch, own)) and _calls_torch(own)


def _calls_torch(functions: Iterable[Any]) -> bool:
    """Tells whether what functions call of torch is torch's: the caller's program may have replaced it."""
    names = {name for each in functions if inspect.isfunction(each) for name in each.__code__.co_names}
    called = [space.get(name) for name in names for space in (vars(functional), vars(torch))]
    return all(map(_is_of_torch, filter(callable, called)))


def _is_of_torch(function: Any) -> bool:
    if inspect.isfunction(function):
        return Path(torch.__file__).parent in Path(function.__code__.co_filename).parents
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0] in ("torch", "builtins", "math")
