"""Rows are moved between servers while workers push, and the model is what it would be without."""

from __future__ import annotations

import functools
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import InfeasiblePlan
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.sparse.moves import MoveKind, ServedMoves
from headrace.parameter_server.sparse.rebalancing import grouped
from headrace.parameter_server.wire import Message
from headrace.policies.row_balance import LoadPiece
from headrace.spec.events import RowsMoved
from headrace.spec.plan import Plan
from headrace.strategies.served import ServerContext

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
    return [layer.weight.detach() for layer in (run.model.item, run.model.other)]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return rows_of(hr.fit(job(), engine=THREADS))


@pytest.mark.one
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
    # Some with rows near the workers, which are those that move.
    near = transport == "shared_memory"
    rows = hr.RowOptions(prefetch=near, hot=20 if near else 0)
    strategy = hr.ParameterServer(3, servers=3, row_placement=f"{placement}:rebalance", transport=transport, rows=rows)
    run = hr.fit(job(), strategy, engine=THREADS)
    moves = [event for event in run.events if isinstance(event, RowsMoved)]
    assert len({event.number for event in moves}) == len(moves) > 1
    for found, wanted in zip(rows_of(run), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@dataclass(frozen=True)
class Dying(hr.ParameterServer):
    """The first server that handles a message of this kind dies before it answers; `folder` is the run's own."""

    kind: int = 0
    folder: str = ""

    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        server = super().server(plan, rank, context)
        moves = _moves_of(server)
        handle = moves.answer

        def answer(worker: int, message: Message, blob: memoryview) -> bytes:
            answered = handle(worker, message, blob)
            if message.flag == self.kind and server.replicated and server.replicated.leads:
                with suppress(FileExistsError):
                    Path(self.folder, "died").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            return answered

        moves.answer = answer  # type: ignore[method-assign]
        return server


def _moves_of(server: Server) -> ServedMoves:
    rows = server._requests.rows
    assert rows is not None
    assert rows.moves is not None
    return rows.moves


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        MoveKind.TAKE,
        pytest.param(MoveKind.INSTALL, marks=pytest.mark.full),
        pytest.param(MoveKind.CLAIM, marks=pytest.mark.full),
    ],
    ids=lambda kind: kind.name.lower(),
)
def test_a_backup_goes_on_with_a_move(kind: MoveKind, real_python: None, tmp_path: Path) -> None:
    strategy = Dying(2, servers=2, backups=1, row_placement="hash:rebalance", kind=kind, folder=str(tmp_path))
    run = hr.fit(job(epochs=1), strategy, device="cpu")
    assert (tmp_path / "died").exists()
    for found, wanted in zip(rows_of(run), rows_of(hr.fit(job(epochs=1), engine=THREADS)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_moves_take_few_rows_and_few_bytes() -> None:
    pieces = [LoadPiece(0, 0, 10_000, 50, 5_000), LoadPiece(0, 20_000, 20_001, 9, 1), LoadPiece(1, 5, 6, 7, 1)]
    chosen = [(piece, 0, 1) for piece in pieces] + [(LoadPiece(0, 30_000, 30_004, 1, 4), 2, 1)]
    moves = list(grouped(chosen, [2_000, 1]))
    assert [(source, target) for _, source, target in moves] == [(0, 1)] * 4 + [(2, 1)]
    assert [[(each.start, each.stop) for each in rows] for rows, _, _ in moves] == [
        [(0, 3_333)],
        [(3_333, 6_666)],
        [(6_666, 10_000), (20_000, 20_001)],
        [(5, 6)],
        [(30_000, 30_004)],
    ]
    many = [(LoadPiece(0, row, row + 1, 1, 1), 0, 1) for row in range(70)]
    assert [len(rows) for rows, _, _ in grouped(many, [2_000])] == [32, 32, 6]


def test_it_is_refused_where_workers_wait_for_each_other() -> None:
    strategy = hr.ParameterServer(2, staleness_bound=0, row_placement="hash:rebalance")
    with pytest.raises(InfeasiblePlan, match=r"moves rows .*; use staleness_bound=None, or row_placement=.hash"):
        hr.fit(job(), strategy, engine=THREADS)
