"""Runs a user's model and loss before they are trained, and leaves them as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.batches import call
from headrace.machine.dynamo import has_compiler
from headrace.modules import stateful_modules
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.untouched import same_generators, untouched


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
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    words, place = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), words, place, numpy["has_gauss"]
