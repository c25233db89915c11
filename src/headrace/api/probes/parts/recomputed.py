"""Does a model compute the same, and write the same once, when its blocks run again in backward?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import HeadraceError, UsageError, in_one_line
from headrace.metrics import Mean
from headrace.modules import same_values
from headrace.spec.job import Job
from headrace.training.recompute.blocks import find_blocks, recompute
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import SavedModule, trial
from headrace.training.user_code.untouched import Counters, untouched

_REMEDY = (
    "make forward a function of its arguments, parameters and buffers, or give patterns that leave the block out, "
    "Options(recompute=...)"
)


@dataclass(frozen=True)
class _Step:
    """What a step made: loss and gradients, what is in attributes and buffers, what changed during backward."""

    values: dict[str, Tensor | None]
    changed: frozenset[str]


def check_recompute(
    job: Job, module: nn.Module, batch: Any, objectives: Sequence[Objective], in_parts: bool = False
) -> None:
    """Takes forward and backward of some examples, with and without running blocks again.

    Of a model that is made `in_parts`, whose parameters have no memory, it finds the blocks alone.

    Raises:
        UsageError: they differ; with the block and the first difference.
    """
    choice = job.options.again
    assert choice is not None
    names = find_blocks(module, choice)
    for objective in () if in_parts else objectives:
        plain = _step(module, batch, objective, None)
        if not (found := _difference(module, batch, objective, choice, plain)):
            continue
        # Where the model itself gives other numbers each time, they tell nothing.
        if _compared(plain, _step(module, batch, objective, None)):
            continue
        own = "selective" if choice == "selective" else None
        alone = {name: _difference(module, batch, objective, name, plain, own) for name in names[:_MOST]}
        where, found = next(((repr(name), each) for name, each in alone.items() if each), (f"{choice!r:.60}", found))
        raise UsageError(f"recompute: {where} cannot run again in backward: {found}; {_REMEDY}")


_MOST = 16
"""Blocks that are tried alone to find the one to be named."""


def _difference(
    module: nn.Module, batch: Any, objective: Objective, choice: Any, plain: _Step, kind: str | None = None
) -> str:
    """Returns in what a step that runs blocks again differs; "" if in nothing."""
    try:
        step = _step(module, batch, objective, choice, kind)
    except HeadraceError as error:
        return str(error)
    except Exception as error:  # whatever a user's model raises when it is run once more
        return in_one_line(error)
    if repeated := sorted(step.changed - plain.changed):
        return f"{repeated[0]!r} is changed once more"
    return _compared(plain, step)


def _compared(plain: _Step, step: _Step) -> str:
    for name, value in plain.values.items():
        other = step.values.get(name)
        if (value is None) != (other is None) or (value is not None and other is not None and not _same(value, other)):
            return f"{name} is another one"
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    return same_values(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else same_values(one, other)


def _step(module: nn.Module, batch: Any, objective: Objective, choice: Any, kind: str | None = None) -> _Step:
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    with (
        trial(module),
        untouched(objective.loss, module, but=list(named.values())),
        SavedModule(module).restoring(),
        torch.enable_grad(),
    ):
        torch.manual_seed(0)
        if choice is not None:
            recompute(module, choice, kind)
        made = objective.of(module, batch)
        loss = made.total if isinstance(made, Mean) else made
        counters = Counters(module, list(named.values()))
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        changed = frozenset(counters.changed())
        values: dict[str, Tensor | None] = {"the loss": loss.detach().clone()}
        values |= {f"the gradient of {name!r}": each for name, each in zip(named, gradients, strict=True)}
        values |= {f"the buffer {name!r}": buffer.detach().clone() for name, buffer in module.named_buffers()}
        values["the next random number"] = torch.rand(1)
        return _Step(values, changed)
