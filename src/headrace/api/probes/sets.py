"""Sets of parameters that are trained in turns, before a process starts: their losses, and who owns what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.metrics import Mean, weigh
from headrace.modules import evaluating, frozen_until, names_of_sets
from headrace.spec.cluster import Cluster
from headrace.spec.job import Job, Share
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan, Segment
from headrace.strategies import Strategy
from headrace.training.embeddings.layer import sparse_layers

Sets = Mapping[str, Sequence[str]]
"""The names of the parameters of each set."""


def find_sets(job: Job, module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the names of each set's parameters; {} where one optimizer has all.

    Raises:
        UsageError: a parameter is in no set, or in two; a set would train nothing for some epochs; the model has a
            sparse embedding.
        UnknownName: a pattern fits no parameter.
    """
    if not job.sets:
        return {}
    for layer in sparse_layers(module):
        raise UsageError(
            f"the sparse embedding {layer.spec.name!r} is updated row by row, by one optimizer for all, and the job "
            f"trains {len(job.sets)} sets of parameters in turns ({', '.join(job.sets)}); use sparse=False there"
        )
    found = names_of_sets(module, job.sets)
    until = frozen_until(module)
    for name, own in found.items():
        if not own:
            raise UsageError(f"all parameters of the set {name!r} are frozen; leave the set out of optimizer and loss")
        if set(own) <= until.keys():
            raise UsageError(
                f"all parameters of the set {name!r} are frozen until epoch {min(until[each] for each in own)}, so its "
                "rounds would train nothing before; leave some out of the patterns of hr.frozen(..., until_epoch=...)"
            )
    return found


def try_loss(
    name: str, loss: Callable[[nn.Module, Any], Any], module: nn.Module, names: Sequence[str], share: Share
) -> Tensor | Mean:
    """Computes a set's loss on a few examples, in evaluation mode, and returns it.

    Raises:
        UsageError: it is no scalar, or depends on no parameter of the set.
    """
    named = dict(module.named_parameters())
    with evaluating(module), torch.enable_grad():
        found: Tensor | Mean = loss(module, share.batch)
        total, _ = weigh(found, share.examples, f"the loss of {name!r}")
        gradients: Sequence[Tensor | None] = ()
        if total.requires_grad:
            gradients = torch.autograd.grad(total, [named[each] for each in names], allow_unused=True)
    if all(each is None for each in gradients):
        raise UsageError(
            f"the loss of {name!r} depends on no parameter of its set ({names[0]}, ...), so its rounds would train "
            "nothing; leave out detach() and no_grad() there: a loss changes the parameters of its own set alone"
        )
    return found


def require_turns(job: object, strategy: Strategy) -> None:
    """Refuses several sets under a strategy or with an option that cannot have them; raises UsageError."""
    if not isinstance(job, Job) or not job.sets:
        return
    several = f"the job trains {len(job.sets)} sets of parameters in turns ({', '.join(job.sets)})"
    if not strategy.turns:
        raise UsageError(
            f"{several}, and {strategy.name} trains all parameters by one optimizer; use one_device, mirrored or "
            "central_storage"
        )
    plain = Options()
    for option, remedy in _NOT_IN_TURNS.items():
        if getattr(job.options, option) != getattr(plain, option):
            value = getattr(job.options, option)
            raise UsageError(f"{several}, and {option}={value!r} is not for them: {remedy}")


_NOT_IN_TURNS = {
    "compile": "their losses call parts of the model, and it compiles the whole; compile those parts in the model "
    "(torch.compile), or leave it out",
    "batch_norm": "a round runs parts of the model alone, so layers would wait for others; use batch_norm='local'",
    "schedule_every": "an epoch's last round is one set's alone; use schedule_every='step', which counts a set's own "
    "rounds",
}
"""Options that several sets cannot have, and what to do."""


def plan_of(strategy: Strategy, model: ModelSpec, cluster: Cluster, sets: Sets) -> Plan:
    """Returns the strategy's plan; of sets that take turns each is divided by itself, so that all have a part of it."""
    plan = replace(strategy.plan(model, cluster), trusted=cluster.trusted)
    if not sets:
        return plan
    holders = {parameter: name for name, own in sets.items() for parameter in own}
    first = next(iter(sets))
    segments: list[Segment] = []
    for name in sets:
        # What is not trained goes with the first.
        own = tuple(each for each in model.parameters if holders.get(each.name, first) == name)
        segments += strategy.plan(replace(model, parameters=own), cluster).segments
    return replace(plan, segments=tuple(segments))
