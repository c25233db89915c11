"""Embedding tables in an exported program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.export.tables import WholeBag, with_whole_tables


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0])
def test_a_bag_is_that_of_torch(mode: str, padding: int | None) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=padding)
    two = nn.ModuleList([bag, bag, nn.Linear(1, 1)])
    whole = with_whole_tables(two)
    assert isinstance(whole, nn.ModuleList)
    assert isinstance(whole[0], WholeBag)
    assert whole[0] is whole[1]
    assert isinstance(two[0], nn.EmbeddingBag)
    input = torch.tensor([[1, 0, 2, 0], [0, 0, 0, 0], [6, 6, 1, 5]])
    assert torch.allclose(whole[0](input), bag(input), atol=1e-6)
    flat, offsets = torch.tensor([1, 0, 2, 5, 5]), torch.tensor([0, 3])
    assert torch.allclose(whole[0](flat, offsets), bag(flat, offsets), atol=1e-6)
    if mode == "sum":
        weights = torch.rand(3, 4)
        assert torch.allclose(whole[0](input, None, weights), bag(input, None, weights), atol=1e-6)


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_rows_of_a_bag_are_as_long_as_it_lets_them_be(norm: float) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(7, 3, mode="sum", max_norm=0.8, norm_type=norm)
    before = bag.weight.detach().clone()
    whole, input = with_whole_tables(bag), torch.tensor([[1, 0, 2, 0], [6, 6, 1, 5]])
    assert torch.equal(bag.weight, before)
    assert torch.allclose(whole(input), bag(input), atol=1e-6)


def test_a_model_without_tables_is_itself() -> None:
    model = nn.Linear(2, 2)
    assert with_whole_tables(model) is model
