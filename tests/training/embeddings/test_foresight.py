"""Which part of a batch a sparse embedding looks up, learnt from the batches before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.spec.embedding import RowInit, TableSpec
from headrace.training.embeddings.foresight import Foresight
from headrace.training.embeddings.layer import SparseEmbedding
from headrace.training.embeddings.local import LocalRows
from headrace.training.embeddings.table import EmbeddingTable

TABLE = TableSpec("item", 50, 2, "float32", RowInit("constant", 0.0))


def batch_of(seed: int, examples: int = 6) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    pairs, more = (torch.randint(0, 50, (examples, *each), generator=chance) for each in ((4,), (2, 3)))
    return {"x": torch.rand(examples, 4, generator=chance), "pairs": pairs, "more": more}


LOOKS = {
    "a whole leaf": lambda batch: [batch["more"]],
    "a whole leaf, flat": lambda batch: [batch["more"].view(-1)],
    "a column": lambda batch: [batch["pairs"][:, 2]],
    "a column of another type": lambda batch: [batch["pairs"][:, 2].int()],
    "some columns": lambda batch: [batch["pairs"][:, 1:3]],
    "a part of each example": lambda batch: [batch["more"][:, 1, ::2]],
    "two columns": lambda batch: [batch["pairs"][:, 0], batch["pairs"][:, 3]],
    "micro-batches": lambda batch: [piece[:, 1:] for piece in batch["pairs"].split(4)],
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_looked_up_next_is_known_from_one_batch(look: str) -> None:
    layer = SparseEmbedding(TABLE, LocalRows(EmbeddingTable(TABLE)))
    foresight = Foresight([layer])
    one, other = batch_of(0), batch_of(1, examples=9)
    assert [len(ids) for ids in foresight.ids(other)] == [0]
    for ids in LOOKS[look](one):
        layer(ids)
    foresight.learn(one)
    (found,) = foresight.ids(other)
    assert torch.equal(found, torch.unique(torch.cat([ids.reshape(-1).long() for ids in LOOKS[look](other)])))
    assert not foresight.unknown(0)


def test_guesses_that_cannot_be_rows_are_left_out() -> None:
    layer = SparseEmbedding(TABLE, LocalRows(EmbeddingTable(TABLE)))
    foresight = Foresight([layer])
    one = batch_of(0)
    layer(one["pairs"][:, 3])
    foresight.learn(one)
    wild = torch.tensor([[0, 0, 0, 7], [0, 0, 0, -1], [0, 0, 0, 50]])
    assert foresight.ids({"pairs": wild})[0].tolist() == [7]
    # Shorter examples, another leaf, or none.
    for batch in ({"pairs": wild[:, :3]}, {"triples": wild}, torch.rand(3), None):
        assert len(foresight.ids(batch)[0]) == 0


def test_computed_indices_stay_unknown_and_what_was_wrong_is_learnt_again() -> None:
    layer = SparseEmbedding(TABLE, LocalRows(EmbeddingTable(TABLE)))
    foresight = Foresight([layer])
    for seed in range(8):
        assert not foresight.unknown(0)
        one = batch_of(seed)
        layer.forget()
        layer((one["pairs"][:, 0] + 1) % 50)
        foresight.learn(one)
    assert foresight.unknown(0)

    other = Foresight([layer])
    for column in (1, 2):
        layer.forget()
        layer(one["pairs"][:, column])
        other.learn(one, again=[0])
        assert torch.equal(other.ids(one)[0], torch.unique(one["pairs"][:, column]))


def test_an_evaluation_teaches_nothing() -> None:
    layer = SparseEmbedding(TABLE, LocalRows(EmbeddingTable(TABLE)))
    foresight = Foresight([layer])
    one = batch_of(0)
    with torch.no_grad():
        layer(one["pairs"][:, 0])
    foresight.learn(one)
    assert len(foresight.ids(one)[0]) == 0
