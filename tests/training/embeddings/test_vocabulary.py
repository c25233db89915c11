"""Tables that hold a limited number of rows: against a plain model of them, over random histories."""

from __future__ import annotations

import copy
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import UnknownName, UsageError
from headrace.spec.embedding import RowLimit, TableSpec
from headrace.training.embeddings.generator import first_rows
from headrace.training.embeddings.pieces import RowBlock
from headrace.training.embeddings.table import EmbeddingTable
from headrace.training.embeddings.vocabulary.index import EVICTIONS, HashIndex, how_many, least_used

COLUMNS = {"sum": (1, 0.5)}


class PlainTable:
    """The same in dictionaries: each row has its value, its last use and the number of its uses."""

    def __init__(self, spec: TableSpec) -> None:
        assert spec.limit is not None
        self.spec, self.limit = spec, spec.limit
        self.rows: dict[int, tuple[Tensor, int, int]] = {}
        self.evicted = self.steps = 0

    def update(self, ids: list[int]) -> None:
        self.steps += 1
        new = sum(row not in self.rows for row in ids)
        over = len(self.rows) + new - self.limit.rows
        if over > 0:
            others = [row for row in self.rows if row not in ids]
            count = min(len(others), max(over, self.limit.rows // 16))
            for row in sorted(others, key=self.order)[:count]:
                del self.rows[row]
            self.evicted += count
        for row in ids:
            value, _, uses = self.rows.get(row, (first_rows(self.spec, torch.tensor([row]))[0], 0, 0))
            self.rows[row] = value + 1.5, self.steps, uses + 1

    def order(self, row: int) -> tuple[int, int, int]:
        _, last, uses = self.rows[row]
        return (last, uses, row) if self.limit.evict == "age" else (uses, last, row)


def updated(table: EmbeddingTable, ids: list[int]) -> None:
    table.steps += 1
    slots = table.slots(torch.tensor(ids))
    table.values[slots] += 1.5


def reloaded(table: EmbeddingTable, chance: random.Random) -> EmbeddingTable:
    other = EmbeddingTable(table.spec, COLUMNS)
    cuts = sorted({0, len(table), *(chance.randrange(len(table) + 1) for _ in range(2))})
    for start, stop in reversed(list(pairwise(cuts))):
        other.load(table.block(start, stop))
    other.steps, other.evicted = table.steps, table.evicted
    return other


@pytest.mark.parametrize("evict", EVICTIONS)
@pytest.mark.parametrize("seed", range(25))
def test_a_limited_table_is_what_a_plain_one_is_over_any_history(seed: int, evict: str) -> None:
    chance = random.Random(seed)
    most = chance.choice([8, 20, 50])
    spec = TableSpec("word", 1 << 50, 3, "float64", seed=seed, limit=RowLimit(most, evict))
    table, plain = EmbeddingTable(spec, COLUMNS), PlainTable(spec)
    words = [chance.randrange(1 << 50) for _ in range(3 * most)]
    for _ in range(60):
        match chance.randrange(8):
            case 0:
                table = copy.deepcopy(table)
                table.evicted = plain.evicted
            case 1:
                table = reloaded(table, chance)
            case _:
                # Some often, as in a text.
                some = chance.choices(words, weights=[1 / (1 + place) for place in range(len(words))], k=most // 2)
                ids = sorted(set(some))
                updated(table, ids)
                plain.update(ids)
        assert (len(table), table.evicted) == (len(plain.rows), plain.evicted)
        assert len(table) <= most
    assert plain.evicted > most
    every = torch.tensor(words)
    expected = [plain.rows[row][0] if row in plain.rows else first_rows(spec, torch.tensor([row]))[0] for row in words]
    assert torch.equal(table.read(every), torch.stack(expected))
    block = table.block(0, most)
    assert block.uses is not None
    found = {row: tuple(uses) for row, uses in zip(block.ids.tolist(), block.uses.tolist(), strict=True)}
    assert found == {row: (last, count) for row, (_, last, count) in plain.rows.items()}


def test_a_row_that_was_evicted_comes_back_as_it_began_with_new_state() -> None:
    spec = TableSpec("word", 1 << 40, 2, "float64", limit=RowLimit(2))
    table = EmbeddingTable(spec, COLUMNS)
    for row in (5, 7, 9):
        table.steps += 1
        slots = table.slots(torch.tensor([row]))
        table.values[slots], table.state["sum"][slots] = 100.0, 200.0
    assert torch.equal(table.read(torch.tensor([5])), first_rows(spec, torch.tensor([5])))
    assert torch.equal(table.read(torch.tensor([7, 9])), torch.full((2, 2), 100.0).double())
    slots = table.slots(torch.tensor([5]))
    assert torch.equal(table.values[slots], first_rows(spec, torch.tensor([5])))
    assert table.state["sum"][slots].item() == 0.5
    assert table.evicted == 2


def test_rows_that_are_loaded_into_a_smaller_table_are_the_most_used() -> None:
    chance = random.Random(1)
    large = EmbeddingTable(TableSpec("word", 1 << 40, 2, limit=RowLimit(40)))
    for _ in range(30):
        updated(large, sorted(chance.sample(range(40), 7)))
    assert len(large) == 40
    small = reloaded_into(large, RowLimit(10), chance)
    block = large.block(0, 40)
    assert block.uses is not None
    gone = set(least_used(block.uses, block.ids, 30, "age").tolist())
    kept = {row for place, row in enumerate(block.ids.tolist()) if place not in gone}
    assert set(small.block(0, 10).ids.tolist()) == kept
    assert small.evicted == 30


def reloaded_into(table: EmbeddingTable, limit: RowLimit, chance: random.Random) -> EmbeddingTable:
    small = EmbeddingTable(TableSpec("word", 1 << 40, 2, limit=limit))
    places = list(range(0, len(table), 8))
    chance.shuffle(places)
    for start in places:
        small.load(table.block(start, start + 8))
    return small


@pytest.mark.parametrize("seed", range(20))
def test_an_index_finds_what_a_dictionary_finds(seed: int) -> None:
    chance = random.Random(seed)
    index, plain = HashIndex(), dict[int, int]()
    # Multiples of one number too, which a bad hash puts into the same places.
    pool = [chance.choice([1, 1 << 20, 1 << 44]) * chance.randrange(1 << 12) for _ in range(3_000)]
    for _ in range(60):
        new = sorted({row for row in chance.sample(pool, 80) if row not in plain})
        if chance.random() < 0.6:
            slots = [chance.randrange(1 << 20) for _ in new]
            index.put(torch.tensor(new, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64))
            plain |= dict(zip(new, slots, strict=True))
        else:
            gone = chance.sample(sorted(plain), len(plain) // 2)
            index.drop(torch.tensor(gone, dtype=torch.int64))
            for row in gone:
                del plain[row]
        asked = sorted({*chance.sample(pool, 200)})
        assert index.find(torch.tensor(asked)).tolist() == [plain.get(row, -1) for row in asked]


@pytest.mark.parametrize(("held", "new", "most", "gone"), [(90, 10, 100, 0), (95, 10, 100, 6), (99, 40, 100, 39)])
def test_a_full_table_drops_a_sixteenth_at_least(held: int, new: int, most: int, gone: int) -> None:
    assert how_many(held, new, most) == gone


def test_an_update_of_more_rows_than_may_be_held_is_refused_with_the_numbers() -> None:
    table = EmbeddingTable(TableSpec("word", 1 << 40, 2, limit=RowLimit(3)))
    with pytest.raises(UsageError, match=r"changes 4 rows of the table 'word', and 3 may be held here; raise max_rows"):
        table.slots(torch.arange(4))


def test_uses_of_other_rows_are_refused() -> None:
    table = EmbeddingTable(TableSpec("word", 1 << 40, 2, limit=RowLimit(3)))
    wrong = RowBlock(torch.tensor([1]), torch.zeros(1, 2), {}, 0, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the uses of 1 rows are \(1, 3\)"):
        table.load(wrong)


def test_limits_that_make_no_sense_are_refused() -> None:
    layer = nn.Embedding(10, 2, sparse=True)
    with pytest.raises(UsageError, match="max_rows must be a whole number from 1 on, got 0"):
        hr.limit_rows(layer, 0)
    with pytest.raises(UnknownName, match="evict"):
        hr.limit_rows(layer, 5, "size")
    with pytest.raises(UsageError, match=r"for nn.Embedding and nn.EmbeddingBag, got Linear"):
        hr.limit_rows(nn.Linear(2, 2), 5)  # type: ignore[type-var]
    with pytest.raises(UsageError, match=r"at most 2\*\*56 ids"):
        hr.limit_rows(nn.Embedding((1 << 56) + 1, 1, device="meta"), 5)
