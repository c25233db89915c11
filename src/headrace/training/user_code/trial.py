"""Runs a user's model and loss before they are trained, and leaves them as they were."""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.batches import call
from headrace.machine.dynamo import has_compiler
from headrace.machine.generators import forked_generators
from headrace.modules import is_dense, stateful_modules
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.untouched import same_generators, untouched

_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}


class WithoutDropout(TorchFunctionMode):
    """Lets layers that draw random numbers keep all."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


def loss_of(module: nn.Module, batch: Any, objective: Objective) -> Any:
    """Runs the model and the loss, which it leaves as it was."""
    # A loss of a part of the model may be made of gradients.
    with torch.set_grad_enabled(objective.model is not None), untouched(objective.loss):
        return objective.of(module, batch)


def run_forward(module: nn.Module, batch: Any, objective: Objective) -> None:
    """Runs what of the model a step runs forward."""
    if objective.model is not None:
        loss_of(module, batch, objective)
    elif any(part is objective.loss for part in module.children()):
        objective.of(module, batch)
    else:
        call(module, batch, objective.inputs)


@contextmanager
def trial(module: nn.Module) -> Iterator[None]:
    """Runs without gradients and without compilers; afterwards, the module and all generators are as they were."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    states = [(part, copy.deepcopy(part.get_extra_state())) for _, part in stateful_modules(module)]
    try:
        with ExitStack() as stack:
            for each in (torch.random.fork_rng(devices=[]), same_generators(), torch.no_grad(), without_compilers()):
                stack.enter_context(each)
            stack.enter_context(untouched(module, but=trained))
            yield
    finally:
        for part, state in states:
            part.set_extra_state(state)


class SavedModule:
    """What a forward, or code that rewrites a module, may change in it; saved once, and put back as often as asked.

    That are attributes and modes, the tables of parameters, buffers, submodules and hooks, the values of buffers, and
    extra state; of a module in TorchScript the mode and the values of buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        # What a forward has kept in attributes may belong to a graph, which cannot be copied.
        scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
        self._modes = [(part, part.training) for part in scripted]
        self._tables = attribute_tables(module)
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._states = [(part, copy.deepcopy(part.get_extra_state())) for _, part in stateful_modules(module)]

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Makes the module afterwards what it was."""
        try:
            yield
        finally:
            for table, was in self._tables:
                table.clear()
                table.update(was)
            for script, mode in self._modes:
                script.training = mode
            for part, state in self._states:
                part.set_extra_state(copy.deepcopy(state))
            with torch.no_grad():
                for buffer, value in self._buffers:
                    buffer.copy_(value)


def attribute_tables(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the tables of attributes of a module and of those in it, each with what it holds now."""
    held = [vars(part) for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    inside = [value for own in held for value in own.values() if type(value) in (dict, OrderedDict)]
    return [(table, dict(table)) for table in (*held, *inside)]


@contextmanager
def unchanged(module: nn.Module, generators: bool = True) -> Iterator[None]:
    """Gives a module back as it was, as `SavedModule` does, and the random numbers; without `generators` not these."""
    with ExitStack() as stack:
        if generators:
            stack.enter_context(same_generators())
            stack.enter_context(forked_generators(module))
        stack.enter_context(SavedModule(module).restoring())
        yield


@contextmanager
def without_compilers() -> Iterator[None]:
    """Runs compiled parts of a model eagerly: compiling them for small batches takes longer than running them."""
    with ExitStack() as stack:
        # Where nothing has been compiled, the compiler need not be imported.
        if has_compiler():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def drawn() -> tuple[object, ...]:
    """Returns the states of the global generators of torch, Python and numpy, which tell whether numbers were drawn."""
    return torch.get_rng_state().numpy().tobytes(), *drawn_without_torch()


def drawn_without_torch() -> tuple[object, ...]:
    """Returns the states of those of Python and numpy; asks torch for nothing, which a mode of it would see."""
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    words, place = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return random.getstate(), words, place, numpy["has_gauss"]


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Returns how far apart elements of two trials are at most; infinity where forms or what is finite differ.

    Whole numbers and truth values are the same, or infinitely far apart.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    one, other = _dense(one), _dense(other)
    # First, and by the one operation that a plan of memory answers, where tensors have no values.
    if torch.equal(one, other):
        return 0.0
    if not _is_inexact(one) or not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    return largest_element(one.nan_to_num(0.0, 0.0, 0.0) - other.nan_to_num(0.0, 0.0, 0.0))


def largest_element(tensor: Tensor) -> float:
    """Returns the largest magnitude of the finite elements; 0 for whole numbers and truth values."""
    if not tensor.numel() or not _is_inexact(tensor):
        return 0.0
    return float(_dense(tensor).nan_to_num(0.0, 0.0, 0.0).abs().max())


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach() if is_dense(tensor) else tensor.detach().to_dense()


def rounding(kind: torch.dtype) -> float:
    """Returns which part of the largest element operations in another order may make of a type."""
    return min(1e3 * torch.finfo(kind).eps, 0.05) if kind.is_floating_point or kind.is_complex else 0.0
