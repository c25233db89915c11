"""An optimizer that a script has made, as a job's: it is made again for parameters of the same names."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError


@dataclass(frozen=True)
class OptimizerLike:
    """What `optimizer_like` returns. `template` has an empty tensor in the place of each parameter."""

    template: torch.optim.Optimizer
    names: tuple[tuple[str, ...], ...]

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """Makes the optimizer; a group of which no parameter is given, as in a stage of a pipeline, is left out."""
        given = dict(named)
        places = zip(self.names, self.template.param_groups, strict=True)
        pairs = [(name, each) for names, group in places for name, each in zip(names, group["params"], strict=True)]
        made = _copied(self.template, {id(each): given.get(name, each) for name, each in pairs})
        wanted = set(map(id, given.values()))
        for group in made.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in wanted]
        if not any(group["params"] for group in made.param_groups):
            raise UsageError(
                f"the {type(made).__name__} has parameters {', '.join(self.names[0][:3])}, and was given "
                f"{', '.join([*given][:3])}; give hr.optimizer_like the job's own model"
            )
        made.param_groups[:] = [group for group in made.param_groups if group["params"]]
        for parameter in [each for each in made.state if id(each) not in wanted]:
            del made.state[parameter]
        return made


def optimizer_like(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerLike:
    """Returns a job's optimizer, of the class, groups, settings, attributes, hooks and state of another.

    For optimizers that a script makes of its model, in groups of its own. Where names choose the groups, `hr.grouped`
    says the same in a line.

    Args:
        optimizer: of parameters of `model`; it stays as it is. Its schedule is for `Options(schedule=...)`.
        model: the job's.

    Raises:
        UsageError: a parameter of the optimizer is not the model's.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}]
        >>> optimizer = hr.optimizer_like(torch.optim.SGD(groups, lr=0.1), model)
        >>> [group["lr"] for group in optimizer(model.named_parameters()).param_groups]
        [0.1, 0.01]
    """
    known = {id(each): name for name, each in model.named_parameters()}
    given = [each for group in optimizer.param_groups for each in group["params"]]
    for place, each in enumerate(given):
        if id(each) not in known:
            raise UsageError(
                f"parameter {place} of the {type(optimizer).__name__}, of shape {tuple(each.shape)}, is none of the "
                f"{type(model).__name__}; give the model of which the optimizer was made"
            )
    names = tuple(tuple(known[id(each)] for each in group["params"]) for group in optimizer.param_groups)
    template = _copied(optimizer, {id(each): nn.Parameter(torch.empty(0), each.requires_grad) for each in given})
    return OptimizerLike(template, names)


def _copied(optimizer: torch.optim.Optimizer, instead: dict[int, Any]) -> torch.optim.Optimizer:
    """Returns a copy with other parameters."""
    # A deep copy takes from the memo what is known to it.
    memo = dict(instead)
    made = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        # Its own copy has its settings, groups and state alone. A schedule has put its own `step` there.
        if name not in ("defaults", "param_groups", "state", "step"):
            vars(made)[name] = copy.deepcopy(value, memo)
    return made
