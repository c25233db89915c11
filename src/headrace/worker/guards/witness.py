"""Whether a worker's process computes what the caller's does, before the first step.

Both compute the loss of two examples, and make the optimizer.

A worker is a process of its own. It imports the files that the job names, and has nothing of what the caller's program
has changed in them meanwhile: a function of a library that was replaced, a global number of another module.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.batches import examples_of
from headrace.errors import JobError
from headrace.metrics import weigh
from headrace.modules import names_of_sets, parts_of
from headrace.spec.job import Job
from headrace.spec.parameter_sets import one_optimizer
from headrace.training.optimizer import build, stand_in
from headrace.training.update import group_settings, make
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import loss_of, trial
from headrace.training.user_code.untouched import untouched
from headrace.worker.run_spec import RunSpec
from headrace.worker.session import alone, build_module, objectives_of, seed_torch

_CPU = torch.device("cpu")


def require_same_results(run: RunSpec, module: nn.Module) -> None:
    """Raises a JobError if loss or optimizer are others than in the caller's process; leaves the model as it was."""
    witness = run.caller.witness if run.caller else None
    if witness is None:
        return
    own = updates_of(run.job, module)
    for what in witness.updates.keys() | own.keys():
        if own.get(what) != witness.updates.get(what):
            raise JobError(_text(what, own.get(what, "none"), witness.updates.get(what, "none")))
    found = seeded_loss(module, witness.batch, objectives_of(run.job, module, run.weighed))
    if same_value(found, witness.loss, module):
        return
    again = build_module(run.job)
    if found != seeded_loss(again, witness.batch, objectives_of(run.job, again, run.weighed)):
        # It draws random numbers that no seed decides.
        return
    raise JobError(_text("the loss of the first examples", f"{found:.9g}", f"{witness.loss:.9g}"))


def _text(what: str, here: str, there: str) -> str:
    return (
        f"{what} is {here} in this worker's process and {there} in the one that called headrace: a worker imports "
        "files by their names, and has nothing of what that program has changed in them (a function of a library "
        "that was replaced, a global variable of another module), nor modes of torch, nor its hash() of texts; make "
        "the change in the file itself or in the function that builds the model or the optimizer, start Python with "
        "PYTHONHASHSEED=0, or use engine=hr.ThreadEngine()"
    )


def updates_of(job: Job, module: nn.Module) -> dict[str, str]:
    """Returns what decides how parameters are updated, as texts: options, and the code of the step."""
    found: dict[str, str] = {}
    parts = parts_of(module, names_of_sets(module, job.sets)) if job.sets else {"": module}
    for name, part in parts.items():
        own = alone(job, name) if job.sets else job
        named = [
            (key, stand_in(each.shape, each.dtype, _CPU, each.requires_grad)) for key, each in part.named_parameters()
        ]
        factory = one_optimizer(own.optimizer, "a set of parameters")
        # What they count begins in the run as it was.
        with untouched(factory, own.options.schedule):
            optimizer = build(factory, named)
            if own.options.schedule is not None:
                make(own.options.schedule, optimizer)
        of = f" of the set {name!r}" if name else ""
        found[f"the code of the optimizer's step{of}"] = f"{type(optimizer).__name__} {_code(type(optimizer).step)}"
        for index, group in enumerate(group_settings(optimizer)):
            for key, value in group["options"].items():
                shown = value["float"] if isinstance(value, dict) and value.keys() == {"float"} else value
                found[f"{key!r} of the optimizer's group {index}{of}"] = str(shown)
    return found


def _code(function: Any) -> str:
    """Returns a digest of a function's code, with that of what it wraps."""
    found = hashlib.sha256()
    while function is not None:
        code, inner = getattr(function, "__code__", None), getattr(function, "__wrapped__", None)
        # Torch's own wrappers differ: its compiler's import adds one, and threads may add one twice.
        if code is not None and (inner is None or Path(torch.__file__).parent not in Path(code.co_filename).parents):
            found.update(code.co_code)
        function = inner
    return found.hexdigest()[:8]


def seeded_loss(module: nn.Module, batch: Any, objectives: Sequence[Objective]) -> float:
    """Returns the mean losses of a batch, added; leaves model, losses and random numbers as they were."""
    total = 0.0
    for objective in objectives:
        with trial(module), untouched(objective.loss):
            total += mean_from_seed(module, batch, objective)
    return total


def mean_from_seed(module: nn.Module, batch: Any, objective: Objective) -> float:
    """Returns the mean loss of a batch with the random numbers of one seed, within a `trial`."""
    seed_torch(0)
    random.seed(0)
    np.random.seed(0)
    total, weight = weigh(loss_of(module, batch, objective), examples_of(batch))
    return float(total) / max(float(weight), 1e-30)


def same_value(found: float, wanted: float, module: nn.Module) -> bool:
    """Tells whether two losses of a model differ by rounding alone."""
    # Of half the digits: the caller may add in another order.
    types = {each.dtype for each in module.parameters() if each.is_floating_point()}
    tolerance = math.sqrt(max((torch.finfo(dtype).eps for dtype in types), default=0.0))
    both_nan = math.isnan(found) and math.isnan(wanted)
    return both_nan or found == wanted or abs(found - wanted) <= tolerance * max(1.0, abs(wanted))
