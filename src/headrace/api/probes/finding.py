"""What a probe finds, and the trial in which probes run a model and leave it as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.api.probes.untouched import same_generators, untouched
from headrace.batches import call
from headrace.engine.dynamo import has_compiler
from headrace.modules import stateful_modules
from headrace.training.user_code.objective import Objective

NAMED = 3
"""Most names that a finding has; of the others it says how many."""


class Scope(StrEnum):
    """Where a finding makes a difference: `headrace doctor job.py` says all of them."""

    SHARES = "several shares of a batch"
    WORKERS = "several workers, each with a share"
    PROCESSES = "several processes"
    OWN_MEANS = "several workers, each with the mean of its own share"
    PIECES = "several micro-batches in one process"
    EQUALITY = "a comparison with one device"
    EVALUATION = "evaluations, whatever the strategy"
    STATE = "what checkpoints have not, whatever the strategy"


@dataclass(frozen=True)
class Finding:
    """One thing about a job that is told before the start.

    Attributes:
        what: what was found, with the numbers.
        where: the layer, buffer or part of the job.
        remedy: what to do about it.
        scope: where it makes a difference.
        refused: whether a run to which it matters is refused: nothing could make its numbers right.
    """

    what: str
    where: str
    remedy: str
    scope: Scope
    refused: bool = False

    @property
    def line(self) -> str:
        """The finding as one line."""
        return f"{self.where}: {self.what}; {self.remedy}"


def names_of(names: list[str]) -> str:
    """Returns the first names, quoted, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(repr(name) for name in names[:NAMED]) + more


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
