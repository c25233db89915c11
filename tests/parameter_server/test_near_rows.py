"""Rows near a worker: copies of hot ones, and those pulled a step early; staleness counts both."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.parameter_server.sparse.near import RowCopies
from headrace.parameter_server.sparse.placement import ROW_PLACEMENTS, RowPlaces
from headrace.parameter_server.sparse.planning import RowOptions
from headrace.parameter_server.sparse.worker import RowReader
from headrace.spec.embedding import RowInit, TableSpec
from headrace.spec.events import RowsRead, ServerStats

TABLE = TableSpec("item", 40, 2, "float64", RowInit("constant", 0.0))
THREADS = hr.ThreadEngine()
ROWS = 60


class _Servers:
    """Two servers, by ranges, whose rows say the version that they were read with."""

    def __init__(self) -> None:
        self.places = RowPlaces(ROW_PLACEMENTS["range"], (TABLE,), 2)
        self.versions: dict[int, int] = {}
        self.now = [10, 20]
        self.pulled: list[list[int]] = []

    def pull(self, number: int, ids: Tensor) -> Iterator[tuple[int, Tensor, int, Tensor]]:
        self.pulled.append(ids.tolist())
        for server, place in enumerate(self.places.split(number, ids)):
            if len(place):
                self.note(server, self.now[server])
                yield server, place, self.now[server], torch.full((len(place), 2), float(self.now[server])).double()

    def note(self, server: int, version: int) -> None:
        self.versions[server] = min(version, self.versions.get(server, version))


def test_a_copy_is_read_for_its_age_and_a_push_says_the_oldest_version() -> None:
    servers = _Servers()
    reader = RowReader(servers, RowOptions(hot=2, hot_age=2))  # type: ignore[arg-type]
    told = []
    for step in range(1, 8):
        reader.begin(step)
        rows = reader.pull(0, torch.tensor([3, 5 + step, 30]))
        reader.end()
        assert rows[1].tolist() == [servers.now[0]] * 2
        told.append((dict(servers.versions), rows[[0, 2], 0].tolist()))
        servers.now = [each + 1 for each in servers.now]
    # Both hot rows are chosen in step 3, when version 12 is pulled, and are pulled again in step 6.
    versions = [10, 11, 12, 12, 12, 15, 15]
    assert told == [({0: each, 1: each + 10}, [each, each + 10]) for each in versions]
    assert [3 in ids for ids in servers.pulled] == [True, True, True, False, False, True, False]
    assert [(each.asked, each.copied, each.early, each.saved_bytes) for each in reader.reads] == [(21, 6, 0, 6 * 16)]
    # An evaluation reads what the servers have.
    assert reader.pull(0, torch.tensor([3, 30]))[:, 0].tolist() == servers.now


def test_copies_are_dropped_when_rows_have_moved() -> None:
    servers = _Servers()
    reader = RowReader(servers, RowOptions(hot=2, hot_age=100))  # type: ignore[arg-type]
    for step in range(5):
        if step == 4:
            servers.places.map = type(servers.places.map)(1)
        reader.begin(step)
        reader.pull(0, torch.tensor([3, 30]))
    assert servers.pulled == [[3, 30], [3, 30], [3, 30], [], [3, 30]]


def test_the_rows_that_are_asked_for_most_are_kept() -> None:
    chance = torch.Generator().manual_seed(0)
    copies = RowCopies(TABLE, most=4, age=8)
    for _ in range(32):
        copies.begin()
        copies.count(torch.cat([torch.arange(4), 4 + torch.randperm(36, generator=chance)[:8].sort().values]))
    assert copies.held.ids.tolist() == [0, 1, 2, 3]


class Sums(nn.Module):
    """Its gradient depends on the data alone, so that its rows are the same however old those are that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, 4, sparse=True, dtype=torch.float64)
        self.biases = nn.ParameterList(torch.zeros(1, dtype=torch.float64) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.item(ids).sum((1, 2)) + sum(self.biases)
        return output


def job(model: Any = Sums, **changes: Any) -> hr.Job:
    chance = torch.Generator().manual_seed(0)
    shares = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.1
    ids = torch.multinomial(shares, 640 * 3, replacement=True, generator=chance).view(640, 3)
    return hr.Job(
        model=model,
        optimizer=functools.partial(torch.optim.SGD, lr=0.5),
        data=(ids, torch.zeros(640, dtype=torch.float64)),
        loss=lambda output, target: (output - target).mean(),
        global_batch_size=16,
        epochs=1,
    )


@functools.cache
def one_device() -> Tensor:
    run = hr.fit(job(), hr.OneDevice(), engine=THREADS)
    rows: Tensor = run.model.item.weight.detach()  # type: ignore[union-attr,operator,assignment]
    return rows


@pytest.mark.slow
def test_pushes_count_as_always_and_staleness_counts_the_copies() -> None:
    strategy = hr.ParameterServer(2, servers=2, rows=hr.RowOptions(hot=10, hot_age=6))
    run = hr.fit(job(), strategy, engine=THREADS)
    rows = run.model.item.weight.detach()  # type: ignore[union-attr,operator]
    torch.testing.assert_close(rows, one_device(), rtol=1e-9, atol=1e-9)
    reads = [table for event in run.events if isinstance(event, RowsRead) for table in event.tables]
    asked, copied = (sum(getattr(each, name) for each in reads) for name in ("asked", "copied"))
    assert len(reads) == 2
    assert asked > copied > 0.2 * asked
    # A worker does not see its own pushes in a copy. One of the two makes enough steps for the oldest copies.
    last = {event.rank: event for event in run.events if isinstance(event, ServerStats)}.values()
    assert max(int(stale) for event in last for counts in event.staleness.values() for stale in counts) >= 6
    shards = [event.shards[-1] for event in last]
    # An answer has rows of 32 bytes, and a version.
    assert sum(each.pulled_bytes - 8 * each.pulls for each in shards) == 32 * (asked - copied)
    assert run.summary.servers.row_reads.copied == copied


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, 4)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.item(ids).sum((1, 2))
        return output


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = hr.limit_rows(nn.Embedding(ROWS, 4, sparse=True), 50)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.item(ids).sum((1, 2)) + self.bias
        return output


@pytest.mark.parametrize(
    ("strategy", "model", "words"),
    [
        (hr.ParameterServer(2, staleness_bound=0, rows=hr.RowOptions(hot=5)), Sums, "older than staleness_bound=0"),
        (hr.ParameterServer(2, staleness_bound=3, rows=hr.RowOptions(hot=5)), Sums, "use staleness_bound=None"),
        (hr.ParameterServer(1, rows=hr.RowOptions(hot=5)), Sums, "would not equal one device; use more workers"),
        (hr.ParameterServer(2, staleness_bound=0, rows=hr.RowOptions(prefetch=True)), Sums, "use staleness_bound=None"),
        (hr.ParameterServer(2, rows=hr.RowOptions(prefetch=True)), Limited, "may evict them from the table 'item'"),
        ("parameter_server(2, rows={'hot': 5})", Dense, r"rows=hr.RowOptions\(hot=5\) is for sparse embeddings"),
    ],
)
def test_near_rows_are_refused_where_they_give_something_up(strategy: Any, model: Any, words: str) -> None:
    with pytest.raises(InfeasiblePlan, match=words):
        hr.fit(job(model), strategy, engine=THREADS)


def test_wrong_options_of_rows_are_named() -> None:
    with pytest.raises(UnknownName, match="warm"):
        hr.ParameterServer(2, rows={"warm": 5})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="hot of rows must be a whole number of at least 0, got -1"):
        hr.RowOptions(hot=-1)
    for name in ("hot", "hot_age"):
        with pytest.raises(UsageError, match=f"{name} of rows must be a whole number of at least ., got None"):
            hr.RowOptions(**{name: None})
    with pytest.raises(UsageError, match="hot_age of rows must be a whole number of at least 1, got 0"):
        hr.RowOptions(hot=5, hot_age=0)
    with pytest.raises(UsageError, match="prefetch of rows must be True or False, got 3"):
        hr.RowOptions(prefetch=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"rows are hr\.RowOptions"):
        hr.ParameterServer(2, rows=5)  # type: ignore[arg-type]
