"""Whether a worker's process computes what the caller's does: both compute the loss of two examples before the start.

A worker is a process of its own. It imports the files that the job names, and has nothing of what the caller's program
has changed in them meanwhile: a function of a library that was replaced, a global number of another module.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.batches import examples_of
from headrace.errors import JobError
from headrace.metrics import weigh
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import loss_of, trial
from headrace.training.user_code.untouched import untouched
from headrace.worker.run_spec import RunSpec
from headrace.worker.session import build_module, objectives_of, seed_torch


def require_same_loss(run: RunSpec, module: nn.Module) -> None:
    """Raises a JobError if the caller's batch has another loss here; leaves the model as it was."""
    witness = run.caller.witness if run.caller else None
    if witness is None:
        return
    found = seeded_loss(module, witness.batch, objectives_of(run.job, module, run.weighed))
    if _same(found, witness.loss, module):
        return
    again = build_module(run.job)
    if found != seeded_loss(again, witness.batch, objectives_of(run.job, again, run.weighed)):
        # It draws random numbers that no seed decides.
        return
    raise JobError(
        f"the loss of the first examples is {found:.9g} in this worker's process and {witness.loss:.9g} in the one "
        "that called headrace: a worker imports files by their names, and has nothing of what that program has "
        "changed in them (a replaced function of a library, a global variable of another module); make the change "
        "in the file itself or in the function that builds the model, or use engine=hr.ThreadEngine()"
    )


def seeded_loss(module: nn.Module, batch: Any, objectives: Sequence[Objective]) -> float:
    """Returns the mean loss of a batch with random numbers of one seed; leaves model and losses as they were."""
    total = 0.0
    for objective in objectives:
        with trial(module), untouched(objective.loss):
            seed_torch(0)
            random.seed(0)
            np.random.seed(0)
            summed, weight = weigh(loss_of(module, batch, objective), examples_of(batch))
            total += float(summed) / max(float(weight), 1e-30)
    return total


def _same(found: float, wanted: float, module: nn.Module) -> bool:
    # Of half the digits: the caller may add in another order.
    types = {each.dtype for each in module.parameters() if each.is_floating_point()}
    tolerance = math.sqrt(max((torch.finfo(dtype).eps for dtype in types), default=0.0))
    both_nan = math.isnan(found) and math.isnan(wanted)
    return both_nan or found == wanted or abs(found - wanted) <= tolerance * max(1.0, abs(wanted))
