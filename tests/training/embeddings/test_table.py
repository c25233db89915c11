"""A table against a dense one that has all rows from the start, over random histories."""

from __future__ import annotations

import copy
import random
from itertools import pairwise

import pytest
import torch

from headrace.spec.embedding import RowInit, TableSpec
from headrace.training.embeddings.generator import first_rows
from headrace.training.embeddings.pieces import RowBlock
from headrace.training.embeddings.table import EmbeddingTable

COLUMNS = {"sum": (1, 0.5)}


@pytest.mark.parametrize("seed", range(20))
def test_a_table_is_the_dense_one_whatever_is_done_to_it(seed: int) -> None:
    chance = random.Random(seed)
    spec = TableSpec("item", 50, 3, "float64", seed=seed)
    table = EmbeddingTable(spec, COLUMNS)
    dense, state, changed = first_rows(spec, torch.arange(50)), torch.full((50, 1), 0.5).double(), set[int]()
    for _ in range(40):
        ids = torch.tensor(sorted(chance.sample(range(50), chance.randrange(1, 9))))
        match chance.randrange(5):
            case 0 | 1:
                slots = table.slots(ids)
                table.values[slots] += 1.5
                table.state["sum"][slots] *= 2
                dense[ids] += 1.5
                state[ids] *= 2
                changed |= set(ids.tolist())
            case 2:
                assert torch.equal(table.read(ids), dense[ids])
            case 3:
                table = copy.deepcopy(table)
            case 4:
                other = EmbeddingTable(spec, COLUMNS)
                # In blocks, and in another order.
                cuts = sorted({0, len(table), *(chance.randrange(len(table) + 1) for _ in range(2))})
                for start, stop in reversed(list(pairwise(cuts))):
                    other.load(table.block(start, stop))
                table = other
        assert len(table) == len(changed)
    assert torch.equal(table.read(torch.arange(50)), dense)
    block = table.block(0, 50)
    assert sorted(block.ids.tolist()) == sorted(changed)
    assert torch.equal(block.state["sum"], state[block.ids])


def test_rows_that_were_only_read_take_no_memory() -> None:
    table = EmbeddingTable(TableSpec("item", 1_000_000_000, 64), COLUMNS)
    rows = table.read(torch.tensor([3, 999_999_999]))
    assert rows.shape == (2, 64)
    assert (len(table), table.nbytes) == (0, 0)
    table.slots(torch.tensor([999_999_999]))
    assert (len(table), table.nbytes) == (1, 65 * 4)


@pytest.mark.parametrize("bad", [-1, 10])
def test_a_row_that_is_not_there_is_refused_with_the_numbers(bad: int) -> None:
    table = EmbeddingTable(TableSpec("item", 10, 2))
    with pytest.raises(ValueError, match=f"no row {bad} in the table 'item', which has 10"):
        table.read(torch.tensor([0, bad]))
    with pytest.raises(ValueError, match=f"no row {bad}"):
        table.slots(torch.tensor([0, bad]))


WRONG = {
    "twice": (
        RowBlock(torch.tensor([1, 1]), torch.zeros(2, 2), {}),
        "of 2 rows of the table 'item', some are there twice",
    ),
    "width": (RowBlock(torch.tensor([1]), torch.zeros(1, 3), {}), r"\(1, 3\) are not 1 rows of 2 numbers"),
    "state": (RowBlock(torch.tensor([1]), torch.zeros(1, 2), {"sum": torch.zeros(1, 2)}), "state 'sum' of 1 rows is"),
}


@pytest.mark.parametrize(("block", "words"), WRONG.values(), ids=WRONG)
def test_rows_of_another_table_are_refused_and_change_nothing(block: RowBlock, words: str) -> None:
    table = EmbeddingTable(TableSpec("item", 10, 2), COLUMNS)
    with pytest.raises(ValueError, match=words):
        table.load(block)
    assert len(table) == 0


def test_removed_rows_begin_anew_and_all_others_stay() -> None:
    spec = TableSpec("item", 30, 2, "float64", RowInit("constant", 0.5))
    table = EmbeddingTable(spec, {"sum": (2, 0.25)})
    ids = torch.tensor([4, 9, 2, 20, 7])
    values = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    table.load(RowBlock(ids, values, {"sum": values + 1}))
    assert table.within([(4, 10)]).ids.tolist() == [4, 9, 7]
    assert table.held(4, 10) == 3
    for row in (4, 20, 7):
        assert table.within([(row, row + 1)], remove=True).ids.tolist() == [row]
    assert len(table) == 2
    assert table.held(0, 30) == 2
    expected = torch.full((5, 2), 0.5, dtype=torch.float64)
    expected[1:3] = values[1:3]
    assert torch.equal(table.read(ids), expected)
    left = table.within([(0, 30)])
    assert torch.equal(left.values[left.ids.argsort()], values[[2, 1]])
    assert torch.equal(left.state["sum"][left.ids.argsort()], values[[2, 1]] + 1)
    table.load(RowBlock(torch.tensor([7]), values[:1], {}))
    assert torch.equal(table.within([(7, 8)]).state["sum"], torch.full((1, 2), 0.25, dtype=torch.float64))
    assert table.within([(2, 10)], remove=True).ids.sort().values.tolist() == [2, 7, 9]
    assert len(table) == table.held(0, 30) == 0
