"""The job's optimizer and schedule over the rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.spec.embedding import TableSpec
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.training.embeddings.rules import rule_of
from headrace.training.embeddings.table import EmbeddingTable
from headrace.training.optimizer import build
from headrace.training.update import Schedule


class RowUpdater:
    """Updates rows as the job's optimizer does, at the learning rates of the schedule.

    Args:
        factory: the job's optimizer.
        model: whose parameters and tables the optimizer is for.
    """

    def __init__(
        self, factory: Callable[..., Any], model: ModelSpec, options: Options, rounds_per_epoch: int = 1
    ) -> None:
        named = [(each.name, _ghost(each.shape, each.dtype, each.trainable)) for each in model.parameters]
        named += [(each.name, _ghost((each.rows, each.width), each.dtype, each.trainable)) for each in model.tables]
        template = build(factory, named)
        self._rules = {table.name: rule_of(template, table.name) for table in model.tables if table.trainable}
        self._schedule = Schedule(options, template, rounds_per_epoch)

    def table(self, spec: TableSpec) -> EmbeddingTable:
        """Returns an empty table with the state that its optimizer keeps."""
        return EmbeddingTable(spec, self.columns(spec))

    def columns(self, spec: TableSpec) -> dict[str, tuple[int, float]]:
        """Returns the state of a row, by key: how many numbers, and what they begin with."""
        if spec.name not in self._rules:
            return {}
        rule, group = self._rules[spec.name]
        return rule.columns(spec.width, group)

    def apply(self, table: EmbeddingTable, ids: Tensor, gradient: Tensor, round_: int, factor: float = 1.0) -> None:
        """Updates distinct rows at `factor` times the learning rate of the round."""
        rule, group = self._rules[table.spec.name]
        table.steps += 1
        if len(ids):
            rate = float(group["lr"]) * factor * self._schedule.warmth(round_)
            rule.update(table, table.slots(ids), gradient, group, rate)

    def advance(self, round_: int) -> None:
        """Counts a round, whether or not it had an update."""
        self._schedule.advance(round_)

    def settings(self) -> dict[str, Any]:
        """Returns groups and schedule as JSON values."""
        return self._schedule.settings()

    def load(self, settings: Mapping[str, Any]) -> None:
        """Loads what `settings` returned."""
        self._schedule.load(settings)


_NOT_WITH_TABLES: Mapping[str, str] = {
    "clip_norm": "the norm of all gradients; clip in the loss, or leave it out",
    "clip_value": "all gradients alike; leave it out",
    "ema_decay": "averages of all rows in every round; leave it out",
    "compile": "one graph, and rows are fetched in forward; leave it out",
}


def check_tables(model: ModelSpec, options: Options) -> None:
    """Refuses options that need all rows of a table in every round.

    Raises:
        UsageError: with the remedy.
    """
    plain = Options()
    for name, needs in _NOT_WITH_TABLES.items() if model.tables else ():
        if getattr(options, name) != getattr(plain, name):
            raise UsageError(f"{name}={getattr(options, name)} with the sparse table {model.tables[0].name!r}: {needs}")
    if model.tables and options.precision == "fp16":
        raise UsageError("precision='fp16' scales the loss, and gradients of rows are not unscaled; use 'bf16'")


def _ghost(shape: tuple[int, ...], dtype: str, trainable: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), requires_grad=trainable)
