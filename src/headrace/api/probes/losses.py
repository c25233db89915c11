"""A loss with parameters or buffers of its own: a part of the model where it can be, else refused.

An `nn.Module` that is the job's loss is trained and saved with the model. What a function has closed over is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headrace.errors import JobError, UsageError
from headrace.metrics import weigh
from headrace.report.format import plural
from headrace.spec.job import Job, Share
from headrace.training.user_code.trial import trial
from headrace.training.user_code.untouched import reachable, untouched
from headrace.worker.evaluations.loss import LossOfModel
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
        if used:
            raise JobError(
                f"the loss depends on {plural(len(used), 'parameter')} that the model that is trained does not have, "
                f"the first of shape {tuple(used[0].shape)}, so nothing would train them; give the nn.Module that has "
                "them as the job's loss itself, or make it a part of the model"
            )
