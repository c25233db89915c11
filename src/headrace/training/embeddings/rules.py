"""How an optimizer updates the rows of a table that have a gradient, and no other row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.training.embeddings.optimizers import LazyAdam, RowwiseAdagrad
from headrace.training.embeddings.table import EmbeddingTable
from headrace.training.optimizer import has_step_hooks

_Group = Mapping[str, Any]


@dataclass(frozen=True)
class RowRule:
    """One optimizer's update of rows; its options are read from the optimizer's group, which a schedule may change.

    Attributes:
        update: updates distinct rows in place, of a table, given their slots, the gradient `(slots, width)`, the group
            and the learning rate.
        kept: what the optimizer keeps for a row: by key, whether for each number of the row or once for the row.
        begins: the option that has what this state begins with; "" where it is 0.
    """

    update: Callable[[EmbeddingTable, Tensor, Tensor, _Group, float], None]
    kept: Mapping[str, bool] = field(default_factory=dict)
    begins: str = ""

    def columns(self, width: int, group: _Group) -> dict[str, tuple[int, float]]:
        """Returns the state of a row, as `EmbeddingTable` takes it."""
        begin = float(group[self.begins]) if self.begins else 0.0
        return {key: (width if each else 1, begin) for key, each in self.kept.items()}


def _add(values: Tensor, slots: Tensor, change: Tensor, factor: float) -> None:
    """Adds `factor * change` to distinct rows; faster than `index_add_`, which allows a row twice."""
    values.index_copy_(0, slots, values.index_select(0, slots).add_(change, alpha=factor))


def _sgd(table: EmbeddingTable, slots: Tensor, gradient: Tensor, group: _Group, rate: float) -> None:
    _add(table.values, slots, gradient, -rate)


def _adagrad(table: EmbeddingTable, slots: Tensor, gradient: Tensor, group: _Group, rate: float) -> None:
    """Does as Duchi et al. 2011."""
    total = table.state["sum"]
    summed = total[slots].add_(gradient.square())
    total[slots] = summed
    table.values[slots] = table.values[slots].addcdiv_(gradient, summed.sqrt_().add_(group["eps"]), value=-rate)


def _rowwise_adagrad(table: EmbeddingTable, slots: Tensor, gradient: Tensor, group: _Group, rate: float) -> None:
    """Does as Adagrad with one accumulator a row."""
    total = table.state["row_sum"]
    summed = total[slots].add_(gradient.square().mean(1, keepdim=True))
    total[slots] = summed
    _add(table.values, slots, gradient / summed.sqrt_().add_(group["eps"]), -rate)


def _lazy_adam(table: EmbeddingTable, slots: Tensor, gradient: Tensor, group: _Group, rate: float) -> None:
    """Does as Adam, but changes no row that has no gradient; its corrections count the updates of the table."""
    first, second = group["betas"]
    mean, square = table.state["exp_avg"], table.state["exp_avg_sq"]
    means = mean[slots].lerp_(gradient, 1 - first)
    squares = square[slots].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    mean[slots], square[slots] = means, squares
    # As torch.optim.SparseAdam, with the correction in the rate.
    rate *= (1 - second**table.steps) ** 0.5 / (1 - first**table.steps)
    table.values[slots] = table.values[slots].addcdiv_(means, squares.sqrt_().add_(group["eps"]), value=-rate)


_ACCUMULATOR = "initial_accumulator_value"
_RULES: Mapping[type, RowRule] = {
    torch.optim.SGD: RowRule(_sgd),
    torch.optim.Adagrad: RowRule(_adagrad, {"sum": True}, _ACCUMULATOR),
    LazyAdam: RowRule(_lazy_adam, {"exp_avg": True, "exp_avg_sq": True}),
    RowwiseAdagrad: RowRule(_rowwise_adagrad, {"row_sum": False}, _ACCUMULATOR),
}
_NEEDS_ALL_ROWS = {
    "weight_decay": "shrinks every row in every step",
    "momentum": "moves rows on that have no gradient",
    "lr_decay": "has a rate that no row-wise form keeps",
    "maximize": "has no row-wise form",
    "amsgrad": "has no row-wise form",
}
_REMEDY = "use torch.optim.SGD, torch.optim.Adagrad, hr.RowwiseAdagrad or hr.LazyAdam"


def _no_rule(optimizer: type[torch.optim.Optimizer], table: str) -> str:
    """Says why an optimizer does not update rows, and what to use instead."""
    name = optimizer.__name__
    if optimizer is torch.optim.SparseAdam:
        return (
            "SparseAdam updates no parameters but tables, and the job has others; use hr.LazyAdam, which does the "
            f"same with the rows of the table {table!r} and is Adam for the others"
        )
    every = f"{name} changes all rows of the table {table!r} in every step, and only the rows of a batch travel"
    if optimizer is torch.optim.LBFGS:
        return f"{every}; make the embedding with sparse=False"
    better = "hr.LazyAdam" if "Adam" in name else "hr.RowwiseAdagrad"
    return f"{every}; {_REMEDY}: here {better} is the nearest"


def rule_of(optimizer: torch.optim.Optimizer, table: str) -> tuple[RowRule, dict[str, Any]]:
    """Returns how an optimizer updates the rows of a table, and the table's group; the table is one of its parameters.

    Raises:
        UsageError: the optimizer changes rows that have no gradient, or none of its groups has the table.
    """
    group = next((group for group in optimizer.param_groups if table in group["param_names"]), None)
    name = type(optimizer).__name__
    if group is None:
        raise UsageError(
            f"no group of the job's {name} has the table {table!r}, which is trained; add it, or freeze it"
        )
    rule = _RULES.get(type(optimizer))
    if rule is None:
        raise UsageError(_no_rule(type(optimizer), table))
    if has_step_hooks(optimizer):
        raise UsageError(
            f"the job's {name} has hooks of its step, and the rows of the table {table!r} are updated without step(); "
            "leave the hooks out, or the embedding's sparse=True"
        )
    for option, what in _NEEDS_ALL_ROWS.items():
        if group.get(option):
            raise UsageError(
                f"{name} with {option}={group[option]} {what}, and only the rows of a batch of the table {table!r} "
                f"travel; give the table a group with {option}=0, or {_REMEDY} without it"
            )
    return rule, group
