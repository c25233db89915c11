"""Batches that lie ready."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from headrace.data import Loader
from headrace.data.pipeline.combined import replayed
from headrace.errors import DataError


def test_batches_come_again_in_their_order_for_any_number_of_workers() -> None:
    batches = [{"x": torch.arange(4) + 10 * number, "word": "a"} for number in range(3)]
    pipeline, size = replayed(batches)
    assert (len(pipeline), size) == (12, 4)
    loaders = [Loader(pipeline, 0, size, (1, 1), rank) for rank in range(2)]
    shares = [list(islice(loader.rounds(), 4)) for loader in loaders]
    assert [share.batch["x"].tolist() for share in shares[0]] == [[0, 1], [10, 11], [20, 21], [0, 1]]
    assert [share.batch["x"].tolist() for share in shares[1]] == [[2, 3], [12, 13], [22, 23], [2, 3]]
    assert loaders[0].portion(1, 1, 4).batch["x"].tolist() == [11]
    assert loaders[0].nothing(0).batch["x"].tolist() == []


def test_nothing_is_copied() -> None:
    pipeline, size = replayed([(torch.arange(4.0),)])
    loader = Loader(pipeline, 0, size, (1,), 0)
    one, two = (share.batch[0].data_ptr() for share in islice(loader.rounds(), 2))
    assert one == two


def test_batches_of_other_lengths_are_left_out_and_longer_ones_cut() -> None:
    batches = [torch.zeros(4, 7), torch.zeros(4, 9), torch.ones(3, 7), torch.zeros(0, 7)]
    pipeline, size = replayed(batches)
    assert (len(pipeline), size) == (6, 3)
    (first, second) = (share.batch for share in Loader(pipeline, 0, size, (1,), 0).sweep())
    assert first.equal(torch.zeros(3, 7))
    assert second.equal(torch.ones(3, 7))


@pytest.mark.parametrize("batches", [[], [torch.zeros(0, 3)], [{"word": "a"}]])
def test_no_batch_is_refused(batches: list[object]) -> None:
    with pytest.raises(DataError, match="no batch has a tensor"):
        replayed(batches)
