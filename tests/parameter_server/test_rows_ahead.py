"""Rows that are pulled a step early: what they lack, what their versions say, and one worker that equals one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.coordinator import Member
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.sparse.messages import encode_push
from headrace.parameter_server.sparse.near import RowsAhead
from headrace.parameter_server.sparse.placement import ROW_PLACEMENTS, RowPlaces
from headrace.parameter_server.sparse.requests import RowRequests
from headrace.parameter_server.sparse.tables import ServedTables
from headrace.parameter_server.wire import Kind, Message, ShardLayout
from headrace.policies.staleness import EveryPush, Unbounded
from headrace.spec.embedding import RowInit, TableSpec
from headrace.spec.events import Notice, RowsRead, ServerStats
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.options import Options

TABLES = (TableSpec("item", 40, 2, "float64", RowInit("constant", 0.0)),)
MODEL = ModelSpec((ParameterSpec("weight", (2,)),), tables=TABLES)
THREADS = hr.ThreadEngine()


class _Transport:
    trusts_clients = True

    def send(self, peer: int, message: bytes, slots: object = (), blob: bytes = b"", limited: bool = True) -> None:
        """The tests look at the tables."""


class _Server:
    """A server that handles each message at once."""

    def __init__(self) -> None:
        self.tables = ServedTables(MODEL, functools.partial(torch.optim.SGD, lr=1.0), Options(), (1, 0), full=True)
        self.machine = Shard(range(2), Unbounded(), EveryPush())
        self._requests = RowRequests(_Transport(), self.tables, self.machine, ServerCounters(ShardLayout([])))  # type: ignore[arg-type]
        self._answers: list[bytes] = []
        self._lease = 0

    def tell(self, message: Message, blob: bytes, early: bool = False) -> int:
        assert early
        self._answers.append(self._requests.answer(Member(0, 0, 0, False, 0), message, memoryview(blob)))
        return len(self._answers) - 1

    def answer(self, number: int) -> bytes:
        return self._answers[number]

    def push(self, worker: int, ids: Tensor) -> None:
        self._lease += 1
        blob = encode_push(TABLES, [(ids, torch.ones(len(ids), 2).double())])
        head = Message(Kind.PUSH_ROWS, 0, 1, self._lease, 1.0, 1.0, (self.machine.version,), number=self._lease)
        self._requests.take(Member(worker, 0, worker, False, worker), head, memoryview(blob))


class _Worker:
    """As much of a worker as `RowsAhead` needs."""

    def __init__(self) -> None:
        self.servers = [_Server(), _Server()]
        self.places = RowPlaces(ROW_PLACEMENTS["range"], TABLES, 2)
        self.moved_bytes = 0

    def push(self, worker: int, ids: Tensor) -> None:
        for server, place in zip(self.servers, self.places.split(0, ids), strict=True):
            server.push(worker, ids[place])


def test_rows_lack_other_workers_pushes_alone_and_their_versions_say_how_many() -> None:
    worker = _Worker()
    ahead = RowsAhead(worker, worker)  # type: ignore[arg-type]
    worker.push(1, torch.arange(40))
    ids = torch.tensor([2, 5, 7, 30, 33])
    ahead.ask(9, [ids])
    # Another worker's push between, then the own one, then others again.
    worker.push(1, torch.tensor([5, 7]))
    own = torch.tensor([2, 5, 30])
    worker.push(0, own)
    ahead.pushed([own], applied=True)
    worker.push(1, torch.tensor([2, 33]))
    (near,) = ahead.land(9)  # type: ignore[misc]
    # By each push 1 is subtracted; rows that the worker has pushed itself were pulled again after that.
    assert near.rows[:, 0].tolist() == [-2, -3, -1, -2, -1]
    # Servers have version 4: the rows that were pulled early lack two pushes of the other worker, the others one.
    assert [server.machine.version for server in worker.servers] == [4, 4]
    assert near.versions.tolist() == [3, 3, 2, 3, 2]
    assert ahead.land(9) is None


def test_a_push_that_was_no_step_is_not_counted() -> None:
    worker = _Worker()
    ahead = RowsAhead(worker, worker)  # type: ignore[arg-type]
    ahead.ask(3, [torch.tensor([2, 30])])
    ahead.pushed([torch.empty(0, dtype=torch.int64)], applied=False)
    (near,) = ahead.land(3)  # type: ignore[misc]
    assert near.versions.tolist() == [0, 0]


def test_rows_that_were_asked_for_before_a_move_are_not_used() -> None:
    worker = _Worker()
    ahead = RowsAhead(worker, worker)  # type: ignore[arg-type]
    ahead.ask(3, [torch.tensor([2, 30])])
    worker.places.map = type(worker.places.map)(1)
    assert ahead.land(3) is None


class Repeating(nn.Module):
    """Each batch has nearly all of the rows, so that most rows of the next one are changed by the worker's own push."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(30, 4, sparse=True, padding_idx=0)
        self.seen = nn.EmbeddingBag(30, 3, sparse=True, mode="mean")
        self.late = nn.Embedding(20, 2, sparse=True)
        self.tower = nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.item(x[:, 0]), self.seen(x[:, 1:]), self.late((x[:, 0] + x[:, 1]) % 20)]
        output: Tensor = self.tower(torch.cat(parts, 1))
        return output.squeeze(1)


def job() -> hr.Job:
    chance = torch.Generator().manual_seed(1)
    x = torch.randint(0, 30, (260, 4), generator=chance)
    y = torch.randn(260, generator=chance, dtype=torch.float64)
    return hr.Job(
        model=Repeating,
        optimizer=functools.partial(torch.optim.Adagrad, lr=0.3),
        data=(x, y),
        eval_data=(x, y),
        loss=nn.functional.mse_loss,
        global_batch_size=13,
        epochs=1,
        options=hr.Options(eval_every=13),
    )


def weights(run: Any) -> Tensor:
    return torch.cat([each.detach().flatten() for each in run.model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("tcp", marks=pytest.mark.full)])
def test_one_worker_equals_one_device(transport: str) -> None:
    expected = hr.fit(job(), hr.OneDevice(), device="cpu", engine=THREADS)
    strategy = hr.ParameterServer(1, servers=2, transport=transport, rows=hr.RowOptions(prefetch=True))
    run = hr.fit(job(), strategy, device="cpu", engine=THREADS)
    torch.testing.assert_close(weights(run), weights(expected), rtol=1e-9, atol=1e-9)
    assert run.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-9)
    # No row lacks a push: none is stale.
    last = {event.rank: event for event in run.events if isinstance(event, ServerStats)}
    assert {stale for event in last.values() for counts in event.staleness.values() for stale in counts} == {"0"}
    (read,) = [event for event in run.events if isinstance(event, RowsRead)]
    tables = {table.name: table for table in read.tables}
    assert all(tables[name].early > 0.7 * tables[name].asked for name in ("item", "seen"))
    assert (tables["late"].early, tables["late"].unforeseen) == (0, True)
    told = [event.text for event in run.events if isinstance(event, Notice)]
    assert [line for line in told if "prefetch pulls no rows of the sparse embedding 'late' early" in line]
