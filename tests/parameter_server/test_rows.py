"""Rows of tables on servers: where they live, their messages, and pushes that count exactly once."""

from __future__ import annotations

import functools
import random
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from headrace.errors import InfeasiblePlan
from headrace.parameter_server.core.events import Join, Leave, Settle
from headrace.parameter_server.core.row_moves import Move, RowMap, RowRange
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.coordinator import Member
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.sparse.messages import (
    decode_pull,
    decode_push,
    decode_rows,
    encode_pull,
    encode_push,
    encode_rows,
)
from headrace.parameter_server.sparse.placement import ROW_PLACEMENTS, RowPlaces
from headrace.parameter_server.sparse.planning import require_rows
from headrace.parameter_server.sparse.requests import RowRequests
from headrace.parameter_server.sparse.tables import ServedTables
from headrace.parameter_server.wire import Kind, Message, ShardLayout, decode
from headrace.policies.staleness import Combination, EveryPush, FirstPushes, Unbounded
from headrace.spec.cluster import Cluster, Host
from headrace.spec.embedding import RowInit, TableSpec
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan, Role
from headrace.strategies.central_storage import CentralStorage
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.one_device import OneDevice

TABLES = (
    TableSpec("item", 40, 2, "float64", RowInit("constant", 0.0)),
    TableSpec("user", 1 << 33, 1, "float64", RowInit("constant", 0.0)),
)
MODEL = ModelSpec((ParameterSpec("weight", (2,)),), tables=TABLES)


@pytest.mark.parametrize("name", ROW_PLACEMENTS)
@pytest.mark.parametrize("servers", [1, 3, 4])
def test_every_row_has_one_server_and_the_servers_about_as_many(name: str, servers: int) -> None:
    ids = torch.arange(0, 1 << 33, (1 << 33) // 12_000)
    every = RowPlaces(ROW_PLACEMENTS[name], TABLES, servers)
    places = every.split(1, ids)
    assert sorted(torch.cat(places).tolist()) == list(range(len(ids)))
    assert max(map(len, places)) < 1.1 * len(ids) / servers
    some = torch.tensor([5, 700, 9_000])
    owners = [server for row in some for server, place in enumerate(places) if row in place]
    alone = every.split(1, ids[some])
    assert owners == [server for row in range(3) for server, place in enumerate(alone) if row in place]


def test_a_range_of_more_rows_than_a_product_has_bits_for() -> None:
    rows = (1 << 62) + 5
    many = (TableSpec("user", rows, 1, "float64", RowInit("constant", 0.0)),)
    places = RowPlaces(ROW_PLACEMENTS["range"], many, 3)
    assert places.owners(0, torch.tensor([0, rows // 3 - 1, rows // 3, rows - 1])).tolist() == [0, 0, 1, 2]


def test_moved_rows_are_where_the_map_says() -> None:
    places = RowPlaces(ROW_PLACEMENTS["range"], TABLES, 4)
    ids = torch.arange(40)
    assert places.owners(0, ids).tolist() == [row // 10 for row in range(40)]
    map_ = RowMap().after(Move(1, (RowRange(0, 5, 15),), 0, 3)).after(Move(2, (RowRange(0, 7, 8),), 3, 0))
    assert places.adopt(map_)
    assert not places.adopt(RowMap(1))
    owners = [3 if 5 <= row < 15 and row != 7 else row // 10 for row in range(40)]
    assert places.owners(0, ids).tolist() == owners
    assert places.since(0, ids).tolist() == [2 if row == 7 else int(5 <= row < 15) for row in range(40)]
    assert places.owners(1, torch.tensor([7])).tolist() == [0]
    for server in range(4):
        own = places.owned(server, RowRange(0, 0, 40))
        assert [row for each in own for row in range(each.start, each.stop)] == [
            row for row in range(40) if owners[row] == server
        ]
    assert places.has(3, RowRange(0, 8, 15))
    assert not places.has(3, RowRange(0, 6, 9))


def test_with_a_hash_single_rows_are_moved() -> None:
    places = RowPlaces(ROW_PLACEMENTS["hash"], TABLES, 4)
    owner = int(places.owners(0, torch.tensor([11]))[0])
    assert places.has(owner, RowRange(0, 11, 12))
    assert places.owned(owner, RowRange(0, 0, 40)) == []
    places.adopt(RowMap().after(Move(1, (RowRange(0, 11, 12),), owner, (owner + 1) % 4)))
    assert places.has((owner + 1) % 4, RowRange(0, 11, 12))
    assert not places.has(owner, RowRange(0, 11, 12))


def test_messages_bring_what_was_sent() -> None:
    item = torch.tensor([3, 39]), torch.randn(2, 2).double()
    user = torch.tensor([1 << 32]), torch.ones(1, 1).double()
    found = decode_push(TABLES, memoryview(encode_push(TABLES, [item, user])))
    for number, sent in enumerate((item, user)):
        assert all(torch.equal(*pair) for pair in zip(found[number], sent, strict=True))
    table, ids = decode_pull(TABLES, memoryview(encode_pull(1, TABLES[1], user[0])))
    assert (table, ids.tolist()) == (1, [1 << 32])
    version, rows = decode_rows(TABLES[0], 2, encode_rows(7, item[1]))
    assert version == 7
    assert torch.equal(rows, item[1])


@pytest.mark.parametrize("seed", range(200))
def test_damaged_messages_are_refused_and_never_believed(seed: int) -> None:
    chance = random.Random(seed)
    item = torch.tensor([3, 39]), torch.ones(2, 2).double()
    blob = bytearray(encode_push(TABLES, [item, (torch.tensor([9]), torch.ones(1, 1).double())]))
    if chance.random() < 0.5:
        del blob[chance.randrange(1, len(blob)) :]
    else:
        # In the heads and in the indices; what is in the gradients cannot be known to be wrong.
        blob[chance.choice([*range(24), *range(56, 80)])] ^= 1 << chance.randrange(8)
    for read in (decode_push, decode_pull):
        # A part that ends where a table does is sound; so is another index of a row.
        with suppress(ValueError):
            read(TABLES, memoryview(bytes(blob)))
    with suppress(ValueError):
        every = decode_push(TABLES, memoryview(bytes(blob)))
        for number, (ids, gradient) in every.items():
            assert len(gradient) == len(ids)
            assert all(0 <= row < TABLES[number].rows for row in ids.tolist())


class _Answers:
    """A transport that keeps what it is given to send."""

    trusts_clients = True

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []

    def send(self, peer: int, message: bytes, slots: object = (), blob: bytes = b"", limited: bool = True) -> None:
        self.sent.append((peer, decode(message)))


def _server(workers: int, combination: Combination) -> tuple[RowRequests, ServedTables, _Answers]:
    answers = _Answers()
    tables = ServedTables(MODEL, functools.partial(torch.optim.SGD, lr=1.0), Options(), (1, 0), full=True)
    machine = Shard(range(workers), Unbounded(), combination)
    counters = ServerCounters(ShardLayout([]))
    return RowRequests(answers, tables, machine, counters), tables, answers  # type: ignore[arg-type]


def _push(requests: RowRequests, worker: int, lease: int, ids: Tensor, number: int = 1, incarnation: int = 0) -> None:
    blob = encode_push(TABLES, [(ids, torch.ones(len(ids), 2).double()), (ids, torch.ones(len(ids), 1).double())])
    message = Message(Kind.PUSH_ROWS, 0, 1, lease, 1.0, 1.0, (requests.machine.version,), number=number)
    requests.take(Member(worker, incarnation, worker, False, worker), message, memoryview(blob))


@pytest.mark.parametrize("seed", range(60))
def test_every_lease_counts_once_however_often_it_is_pushed(seed: int) -> None:
    """Workers push leases, lose connections, die and come back; a lease whose answer was lost is pushed again."""
    chance = random.Random(seed)
    requests, tables, answers = _server(3, EveryPush())
    rows = [torch.tensor(sorted(chance.sample(range(40), 5))) for _ in range(30)]
    todo = {lease: chance.randrange(1, 4) for lease in range(30)}
    incarnations = [0, 0, 0]
    while todo:
        worker, lease = chance.randrange(3), chance.choice(list(todo))
        match chance.randrange(6):
            case 0:
                incarnations[worker] += chance.randrange(2)
                requests.drop(worker)
                requests.broadcast(Join(worker, incarnations[worker]))
            case 1:
                requests.drop(worker)
                requests.broadcast(Leave(worker))
            case _:
                before = len(answers.sent)
                _push(requests, worker, lease, rows[lease], incarnation=incarnations[worker])
                (answer,) = (message for _, message in answers.sent[before:])
                # A stranger's push is refused; all others are applied, or were before.
                if answer.flag != 1:
                    todo[lease] -= 1
                    if not todo[lease]:
                        del todo[lease]
    expected = torch.zeros(40, dtype=torch.float64)
    for ids in rows:
        expected[ids] -= 1
    assert torch.equal(tables.tables[0].read(torch.arange(40)), expected[:, None].expand(40, 2))
    assert torch.equal(tables.tables[1].read(torch.arange(40)), expected[:, None])


@pytest.mark.parametrize("seed", range(30))
def test_rounds_apply_the_mean_of_all_workers_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    requests, tables, answers = _server(3, FirstPushes(3))
    expected = torch.zeros(40, dtype=torch.float64)
    for round_ in range(10):
        order = chance.sample(range(3), 3)
        rows = [torch.tensor(sorted(chance.sample(range(40), 6))) for _ in range(3)]
        for place, worker in enumerate(order):
            if chance.random() < 0.3:
                # The connection breaks, and the push is repeated on another one.
                _push(requests, worker, 3 * round_ + worker, rows[worker])
                if place == 2:
                    break
                requests.drop(worker)
                requests.broadcast(Join(worker, 0))
            assert len(answers.sent) == 3 * round_
            _push(requests, worker, 3 * round_ + worker, rows[worker])
        assert sorted(peer for peer, _ in answers.sent[3 * round_ :]) == [0, 1, 2]
        for ids in rows:
            expected[ids] -= 1 / 3
        if chance.random() < 0.2:
            requests.broadcast(Settle())
    found = tables.tables[0].read(torch.arange(40))
    torch.testing.assert_close(found, expected[:, None].expand(40, 2), rtol=1e-12, atol=1e-12)


def test_a_server_whose_state_was_copied_goes_on_as_the_first_one() -> None:
    factory = functools.partial(torch.optim.Adagrad, lr=0.5)
    one, other = (ServedTables(MODEL, factory, Options(), (1, 0)) for _ in range(2))
    gradient = {0: (torch.tensor([3, 8]), torch.ones(2, 2).double())}
    one.apply(gradient, 0.5, 0)
    state, tensors = one.state()
    other.load(state, tensors)
    for each in (one, other):
        each.apply(gradient, 1.0, 0)
    assert torch.equal(one.tables[0].read(torch.arange(40)), other.tables[0].read(torch.arange(40)))
    assert one.state()[0] == other.state()[0]


def test_tables_that_fit_nowhere_are_refused_with_the_numbers() -> None:
    roles = tuple(Role(rank, kind, "a", "cpu", 1, 0) for rank, kind in enumerate(["worker", "server", "server"]))
    plan = Plan("parameter_server", {}, roles, (1,), 8, ())
    cluster = Cluster((Host("a", 2, 1 << 30),), "cpu")
    table = TableSpec("item", 10_000_000, 64, state_width=64)
    with pytest.raises(InfeasiblePlan, match=r"needs 5,120,000,000 bytes on a .* it has 1,073,741,824 left.*'item'"):
        require_rows("parameter_server", [table], None, plan, cluster)
    require_rows("parameter_server", [table], 1_000_000, plan, cluster)


@pytest.mark.parametrize("ids", [[3, 3], [5, 3], [3, 40], [-1, 3]])
def test_a_push_for_a_row_twice_or_for_none_is_refused(ids: list[int]) -> None:
    none = torch.empty(0, dtype=torch.int64), torch.empty(0, 1).double()
    blob = encode_push(TABLES, [(torch.tensor(ids), torch.ones(2, 2).double()), none])
    with pytest.raises(ValueError, match="a push for rows that the table 'item' has not, or twice for one row"):
        decode_push(TABLES, memoryview(blob))


def test_tables_that_fit_into_no_worker_are_refused_with_the_numbers() -> None:
    model = ModelSpec((ParameterSpec("weight", (2,)),), tables=(TableSpec("item", 1_000_000, 64, state_width=64),))
    enough, less = (Cluster((Host("a", 2, memory_bytes),)) for memory_bytes in (1 << 30, 1 << 29))
    assert OneDevice().plan(model, less).workers == 1
    for strategy in (Mirrored(2), CentralStorage(2)):
        assert strategy.plan(model, enough).workers == 2
        with pytest.raises(InfeasiblePlan, match=r"1,024,000,000 bytes on a .* on 2 workers, .* 536,870,912 .*'item'"):
            strategy.plan(model, less)
