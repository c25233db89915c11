"""Rows are moved between servers while workers push, and the model is what it would be without."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import InfeasiblePlan
from headrace.spec.events import RowsMoved

THREADS = hr.ThreadEngine()
ROWS = 200


class Sums(nn.Module):
    """Its gradient depends on the data alone, so that its rows are the same in whatever order workers push."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, 4, sparse=True)
        self.other = nn.Embedding(ROWS, 4, sparse=True)
        self.biases = nn.ParameterList(torch.zeros(1) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.item(ids).sum((1, 2)) + 2 * self.other(ROWS - 1 - ids).sum((1, 2)) + sum(self.biases)
        return output


def job(epochs: int = 2) -> hr.Job:
    chance = torch.Generator().manual_seed(0)
    shares = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.1
    ids = torch.multinomial(shares, 2_000 * 3, replacement=True, generator=chance).view(2_000, 3)
    return hr.Job(
        model=Sums,
        optimizer=functools.partial(torch.optim.SGD, lr=0.5),
        data=(ids, torch.zeros(2_000)),
        loss=lambda output, target: (output - target).mean(),
        global_batch_size=32,
        epochs=epochs,
    )


def rows_of(run: hr.Run) -> list[Tensor]:
    every = torch.arange(ROWS)
    return [layer.source.pull(every) for layer in (run.model.item, run.model.other)]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return rows_of(hr.fit(job(), engine=THREADS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "transport"),
    [
        ("hash", "shared_memory"),
        ("range", "tcp"),
        pytest.param("range", "shared_memory", marks=pytest.mark.full),
        pytest.param("hash", "tcp", marks=pytest.mark.full),
    ],
)
def test_moved_rows_have_all_updates_once(placement: str, transport: str, expected: list[Tensor]) -> None:
    strategy = hr.ParameterServer(3, servers=3, row_placement=f"{placement}:rebalance", transport=transport)
    run = hr.fit(job(), strategy, engine=THREADS)
    moves = [event for event in run.events if isinstance(event, RowsMoved)]
    assert len({event.number for event in moves}) == len(moves) > 1
    for found, wanted in zip(rows_of(run), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_it_is_refused_where_rows_cannot_move() -> None:
    for strategy in (
        hr.ParameterServer(2, staleness_bound=0, row_placement="hash:rebalance"),
        hr.ParameterServer(2, backups=1, row_placement="hash:rebalance"),
    ):
        with pytest.raises(
            InfeasiblePlan, match=r"moves rows .*; use backups=0 and staleness_bound=None, or row_placement=.hash"
        ):
            hr.fit(job(), strategy, engine=THREADS)
