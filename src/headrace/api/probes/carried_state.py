"""Does a forward change what the next one computes, by something that is neither a parameter nor a buffer?

A hidden state that is carried on, a counter of steps: each worker has its own, and no checkpoint has it. One batch is
computed alone, and after another one, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from headrace import internals
from headrace.api.probes.finding import Finding, Scope, names_of
from headrace.api.probes.parts.sample import Sample
from headrace.hooks import silenced
from headrace.metrics import weigh
from headrace.modules import stateful_modules
from headrace.training.user_code.trial import run_forward
from headrace.training.user_code.untouched import Counters, untouched
from headrace.worker.attributes import AttributeWalk, attributes_of, copied, same
from headrace.worker.guards.witness import mean_from_seed

CARRIED = (
    "forward carries it from batch to batch outside of parameters and buffers, so each worker carries its own, and no "
    "checkpoint has it"
)
COUNTED = (
    "each forward changes it, and it is neither a parameter nor a buffer, so each worker has its own, it changes with "
    "each micro-batch, and no checkpoint has it"
)
NUMBERED = (
    "each call changes this number (or iterator, or list), which is neither a parameter nor a buffer: each worker has "
    "its own, each micro-batch changes it, and neither checkpoints nor run.model have it"
)
_REMEDY = "keep it in a buffer (register_buffer), or return it from get_extra_state"


def probe_carried_state(sample: Sample) -> Sequence[Finding]:
    """Compares the loss of a batch with that after another batch, which the model or the loss has seen."""
    first, second = sample.halves()
    alone, _ = _loss_after(second, None)
    types = {each.dtype for each in sample.module.parameters() if each.is_floating_point()}
    least = 8 * max((torch.finfo(dtype).eps for dtype in types), default=0.0) * abs(alone)
    after, _ = _loss_after(second, first.batch)
    if abs(after - alone) <= least:
        return list(_counting(first))
    findings = []
    # Which of the two it is, is asked only where it is one of them.
    for owner in (sample.module, sample.objective.loss):
        after, changed = _loss_after(second, first.batch, owner)
        names = names_of(list(changed))
        if abs(after - alone) > least and owner is sample.module:
            counts = changed and all(isinstance(value, int | float) for value in changed.values())
            where = f"the model's {names}" if changed else "the model"
            findings.append(Finding(COUNTED if counts else CARRIED, where, _REMEDY, Scope.STATE))
        elif abs(after - alone) > least:
            what = "it changes from call to call, so each worker has its own, and no checkpoint has it"
            remedy = "give an nn.Module as the loss, and keep it there in a buffer (register_buffer)"
            findings.append(Finding(what, f"the loss ({names})" if changed else "the loss", remedy, Scope.STATE))
    return findings


def _counting(sample: Sample) -> Iterator[Finding]:
    """Yields what counts in forward, in the loss, and in the backward pass, as hooks do: it may act later."""
    module, objective = sample.module, sample.objective
    with sample.trial(), silenced(list(module.parameters())):
        # What is saved is another matter.
        saved: list[Any] = [*module.parameters(), *module.buffers()]
        saved += [each for _, part in stateful_modules(module) for each in (part, vars(part))]
        models = Counters(module, saved)
        losses = Counters(objective.loss, [*models.seen, *saved])
        with torch.enable_grad():
            total, _ = weigh(objective.of(module, sample.batch), sample.count)
            trained = [each for each in module.parameters() if each.requires_grad]
            if total.requires_grad:
                torch.autograd.grad(total, trained, allow_unused=True)
        for where, counters in (("the model's", models), ("the loss's", losses)):
            if names := counters.changed():
                yield Finding(NUMBERED, f"{where} {names_of(names)}", _REMEDY, Scope.STATE)


def _loss_after(sample: Sample, before: Any | None, owner: Any = None) -> tuple[float, dict[str, Any]]:
    """Returns the loss of a batch after one before it, of which the owner, or both, keep what has changed.

    Also the attributes of the owner that changed.
    """
    module, objective = sample.module, sample.objective
    changed: dict[str, Any] = {}
    unsaved: dict[str, Any] = {}
    with sample.trial():
        if before is not None:
            states = [(part, part.get_extra_state()) for _, part in stateful_modules(module)]
            with ExitStack() as stack:
                # What is saved is another matter.
                plain = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
                stack.enter_context(untouched(*map(internals.buffers, plain), *module.parameters()))
                start = _values(owner)
                if owner is module:
                    run_forward(module, before, objective)
                else:
                    if owner is not None:
                        stack.enter_context(untouched(module))
                    # Which may be made of gradients.
                    with torch.set_grad_enabled(objective.model is not None):
                        objective.of(module, before)
                now = _values(owner)
                changed |= {path: now[path] for path in now if path not in start or not same(now[path], start[path])}
                unsaved = _unsaved(module) if owner in (None, module) else {}
            for part, state in states:
                part.set_extra_state(state)
            for path, attribute in attributes_of(module).items() if unsaved else ():
                if path in unsaved:
                    attribute.replace(unsaved[path])
        return mean_from_seed(module, sample.batch, objective), changed


def _unsaved(module: nn.Module) -> dict[str, Any]:
    """Returns copies of the buffers that are not saved."""
    saved = module.state_dict(keep_vars=True)
    if all(name in saved for name, _ in module.named_buffers()):
        return {}
    buffers = {id(each) for each in module.buffers()}
    return {path: copied(each.value) for path, each in attributes_of(module).items() if id(each.value) in buffers}


def _values(owner: Any) -> Mapping[str, Any]:
    if isinstance(owner, nn.Module):
        found = attributes_of(owner)
    else:
        walk = AttributeWalk(set())
        walk.visit("", owner, None)
        found = walk.found
    return {path.lstrip("."): copied(each.value) for path, each in found.items()}
