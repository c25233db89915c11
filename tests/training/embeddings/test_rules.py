"""Updates of rows against torch's own optimizers, on the same sparse gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headrace.errors import UsageError
from headrace.spec.embedding import TableSpec
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.options import Options
from headrace.training.embeddings.generator import first_rows
from headrace.training.embeddings.layer import combine
from headrace.training.embeddings.optimizers import LazyAdam, RowwiseAdagrad
from headrace.training.embeddings.updater import RowUpdater

TABLE = TableSpec("item", 12, 3, "float64", seed=1)
MODEL = ModelSpec((ParameterSpec("tower.weight", (2, 2), "float64"),), tables=(TABLE,))
TORCH = [
    (functools.partial(torch.optim.SGD, lr=0.1), functools.partial(torch.optim.SGD, lr=0.1)),
    (
        functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
        functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
    ),
    (functools.partial(LazyAdam, lr=0.1), functools.partial(torch.optim.SparseAdam, lr=0.1)),
]


def _gradients(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    every = []
    for _ in range(steps):
        ids = torch.randperm(TABLE.rows, generator=generator)[:4].sort().values
        every.append((ids, torch.randn(4, TABLE.width, generator=generator, dtype=torch.float64)))
    return every


def _trained(factory: Callable[..., Any], steps: int) -> torch.Tensor:
    updater = RowUpdater(factory, MODEL, Options())
    table = updater.table(TABLE)
    for round_, (ids, gradient) in enumerate(_gradients(steps)):
        updater.apply(table, ids, gradient, round_)
    return table.read(torch.arange(TABLE.rows))


@pytest.mark.parametrize(("ours", "theirs"), TORCH)
def test_rows_move_as_with_torchs_optimizer(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    weight = nn.Parameter(first_rows(TABLE, torch.arange(TABLE.rows)))
    optimizer = theirs([weight])
    for ids, gradient in _gradients(8):
        with torch.sparse.check_sparse_tensor_invariants():
            weight.grad = torch.sparse_coo_tensor(ids[None], gradient, tuple(weight.shape), is_coalesced=True)
            optimizer.step()
    torch.testing.assert_close(_trained(ours, 8), weight.detach(), rtol=1e-9, atol=1e-12)


def test_rowwise_adagrad_has_one_accumulator_a_row() -> None:
    values, total = first_rows(TABLE, torch.arange(TABLE.rows)), torch.zeros(TABLE.rows, 1, dtype=torch.float64)
    for ids, gradient in _gradients(8):
        total[ids] += (gradient**2).mean(1, keepdim=True)
        values[ids] -= 0.1 * gradient / (total[ids].sqrt() + 1e-10)
    torch.testing.assert_close(_trained(functools.partial(RowwiseAdagrad, lr=0.1), 8), values, rtol=1e-9, atol=1e-12)
    updater = RowUpdater(functools.partial(RowwiseAdagrad, lr=0.1), MODEL, Options())
    assert updater.columns(TABLE) == {"row_sum": (1, 0.0)}


def test_a_schedule_and_warm_up_drive_the_rows_too() -> None:
    options = Options(warmup=2, schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5))
    updater = RowUpdater(functools.partial(torch.optim.SGD, lr=1.0), MODEL, options)
    table = updater.table(TABLE)
    ids, one, moved = torch.tensor([4]), torch.ones(1, 3, dtype=torch.float64), []
    for round_ in range(7):
        before = table.read(ids)
        updater.apply(table, ids, one, round_, 0.5)
        updater.advance(round_)
        moved.append(float((before - table.read(ids))[0, 0]))
    assert moved == pytest.approx([0.25, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125])


REFUSED = [
    (torch.optim.Adam, "Adam changes all rows of the table 'item' in every step.*hr.LazyAdam is the nearest"),
    (torch.optim.AdamW, "AdamW changes all rows of the table 'item'.*hr.LazyAdam"),
    (torch.optim.SparseAdam, "SparseAdam updates no parameters but tables.*hr.LazyAdam, which does the same"),
    (torch.optim.LBFGS, "LBFGS changes all rows of the table 'item'.*; make the embedding with sparse=False"),
    (torch.optim.RMSprop, "RMSprop changes all rows.*hr.RowwiseAdagrad is the nearest"),
    (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "SGD with momentum=0.9 moves rows on.*momentum=0"),
    (functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.01), "SGD with weight_decay=0.01 shrinks every row"),
    (functools.partial(torch.optim.Adagrad, lr_decay=0.1), "Adagrad with lr_decay=0.1"),
]


@pytest.mark.parametrize(("factory", "words"), REFUSED)
def test_an_optimizer_that_needs_the_dense_table_is_refused_with_the_remedy(
    factory: Callable[..., Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        RowUpdater(factory, MODEL, Options())


def test_a_group_of_its_own_without_decay_makes_a_table_trainable() -> None:
    def factory(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        tables = [(name, each) for name, each in named if name == "item"]
        others = [(name, each) for name, each in named if name != "item"]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": tables, "lr": 0.5}]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)

    ids, gradient = _gradients(1)[0]
    expected = first_rows(TABLE, ids) - 0.5 * gradient
    torch.testing.assert_close(_trained(factory, 1)[ids], expected)


def test_gradients_of_the_same_rows_are_added() -> None:
    ids, total = combine(
        [torch.tensor([1, 4]), torch.tensor([0, 4])], [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]])]
    )
    assert (ids.tolist(), total.tolist()) == ([0, 1, 4], [[3.0], [1.0], [7.0]])
