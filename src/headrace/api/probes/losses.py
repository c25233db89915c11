"""A loss with parameters or buffers of its own: a part of the model where it can be, else refused.

An `nn.Module` that is the job's loss is trained and saved with the model. What a function has closed over is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headrace.api.probes.finding import Finding, Scope
from headrace.api.probes.parts.sample import Sample
from headrace.batches import call, select_target
from headrace.errors import JobError, UsageError
from headrace.metrics import weigh
from headrace.report.format import plural
from headrace.spec.job import Job, Share
from headrace.training.user_code.trial import drawn, trial
from headrace.training.user_code.untouched import reachable, untouched
from headrace.worker.evaluations.loss import LossOfModel
from headrace.worker.guards.witness import mean_from_seed, same_value
from headrace.worker.session import objectives_of


def join_loss(job: Job, whole_model: bool) -> Job:
    """Makes a loss that is a module with parameters or buffers a part of the model, where workers run the whole model.

    Raises:
        UsageError: it has parameters, and cannot be a part of it.
    """
    losses: dict[str, Any] = dict(job.loss) if isinstance(job.loss, Mapping) else {"": job.loss}
    for name, loss in losses.items():
        count = _trained(loss)
        if count and (name or not whole_model):
            why = "sets of parameters have losses of the model" if name else "this strategy divides the model"
            raise UsageError(
                f"the loss{f' of {name!r}' if name else ''} has {plural(count, 'parameter')} of its own, and {why}, so "
                "nothing would train them; make it a part of the model, whose forward returns the loss, or use a "
                "strategy that runs the whole model with one loss: one_device, mirrored, parameter_server"
            )
    loss = losses.get("")
    if not isinstance(loss, nn.Module) or not whole_model:
        return job
    # Those of torch have constant weights of classes at most.
    keeps = not type(loss).__module__.startswith("torch.nn.") and next(loss.buffers(), None) is not None
    return replace(job, loss=LossOfModel(loss)) if _trained(loss) or keeps else job


def _trained(loss: Any) -> int:
    if not isinstance(loss, nn.Module):
        return 0
    return sum(parameter.requires_grad for parameter in loss.parameters())


def check_loss_parameters(job: Job, module: nn.Module, sample: Callable[[], Share]) -> None:
    """Raises a JobError where the loss depends on parameters that are not the model's, so that nothing trains them."""
    of_model = {id(parameter) for parameter in module.parameters()}
    for objective in objectives_of(job, module):
        others = [
            each
            for each in reachable(objective.loss)
            if isinstance(each, nn.Parameter) and each.requires_grad and id(each) not in of_model
        ]
        if not others:
            continue
        share = sample()
        with trial(module), untouched(objective.loss), torch.enable_grad():
            total, _ = weigh(objective.of(module, share.batch), share.examples)
            gradients = torch.autograd.grad(total, others, allow_unused=True) if total.requires_grad else ()
        used = [each for each, gradient in zip(others, gradients, strict=False) if gradient is not None]
        if used and isinstance(job.model, nn.Module) and id(used[0]) in set(map(id, job.model.parameters())):
            raise JobError(
                f"the loss depends on {plural(len(used), 'parameter')} of the model that was given, {_OF_A_COPY}; for "
                "a sum of squares use the optimizer's weight_decay"
            )
        if used:
            raise JobError(
                f"the loss depends on {plural(len(used), 'parameter')} that the model that is trained does not have, "
                f"the first of shape {tuple(used[0].shape)}, so nothing would train them; give the nn.Module that has "
                "them as the job's loss itself, or make it a part of the model"
            )


def check_loss_of_copy(job: Job, given: nn.Module, module: nn.Module, sample: Callable[[], Share]) -> None:
    """Raises a JobError where the loss looks at the model that was given, and workers train copies of it."""
    parts = {id(part): name for name, part in given.named_modules()}
    losses: list[Any] = list(job.loss.values()) if isinstance(job.loss, Mapping) else [job.loss]
    for loss in losses:
        own = loss.module if isinstance(loss, LossOfModel) else loss
        held = [each for each in own.modules() if id(each) in parts] if isinstance(own, nn.Module) else []
        if any(map(_trained, held)):
            name = parts[id(held[0])]
            raise JobError(f"the loss has {f'{name!r} of the model' if name else 'the model'} as a part, {_OF_A_COPY}")
    inside = set(map(id, reachable(given)))
    for objective in objectives_of(job, module):
        if not any(id(each) in inside for each in reachable(objective.loss)):
            continue
        batch = sample().batch
        modes = {name: part.training for name, part in module.named_modules()}
        with trial(given), trial(module), untouched(objective.loss):
            for name, part in given.named_modules():
                part.training = modes.get(name, part.training)
            of_copy = mean_from_seed(module, batch, objective)
            of_given = mean_from_seed(given, batch, objective)
        if not same_value(of_copy, of_given, module):
            raise JobError(
                f"the loss is {of_given:.9g} with the model that was given and {of_copy:.9g} with a copy: it looks at "
                f"what that model keeps (a variable, a list), {_OF_A_COPY}"
            )


def probe_left_behind(sample: Sample) -> Sequence[Finding]:
    """Computes the loss of the same outputs again, after a forward of other examples, which another thread may run."""
    module, objective = sample.module, sample.objective
    if objective.model is not None:
        return ()
    first, second = sample.halves()
    with sample.trial():
        before = drawn()
        output, target = call(module, first.batch, objective.inputs), select_target(first.batch, objective.target)
        values = []
        for _ in range(2):
            with untouched(objective.loss):
                total, weight = weigh(objective.loss(output, target), first.count)
            values.append(float(total) / max(float(weight), 1e-30))
            call(module, second.batch, objective.inputs)
        if drawn() != before or same_value(values[1], values[0], module):
            return ()
    what = (
        f"that of the same outputs is {values[0]:.6g}, and {values[1]:.6g} after a forward of other examples: it looks "
        "at what forward leaves elsewhere (an attribute of a class, a global variable), which other stages lack, and "
        "workers in threads share"
    )
    remedy = "return it from forward, with the output, or use a strategy that runs the whole model, as mirrored"
    return (Finding(what, "the loss", remedy, Scope.PROCESSES, refused=True),)


_OF_A_COPY = (
    "and workers train copies of the model, which it would not see; return from forward what the loss needs, or make "
    "the loss a part of the model, whose forward returns it"
)
