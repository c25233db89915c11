"""The zoo: sizes and shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.models import alexnet, char_lstm, cnn, fashion_cnn, mlp


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_benchmarks_models_have_the_size_that_their_tables_say() -> None:
    assert parameters(mlp()) == 5_824_522
    assert parameters(cnn()) == 2_193_226
    assert mlp()(torch.rand(3, 784)).shape == (3, 10)
    assert cnn()(torch.rand(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("size", [8, 28, 33])
def test_fashion_cnn_reads_images_of_any_size(size: int) -> None:
    assert fashion_cnn()(torch.rand(4, 1, size, size)).shape == (4, 10)


def test_alexnet_holds_nearly_all_in_its_dense_layers() -> None:
    model = alexnet()
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert parameters(model.classifier) > 0.93 * parameters(model)


def test_char_lstm_predicts_at_every_place_from_what_came_before() -> None:
    torch.manual_seed(0)
    model = char_lstm(vocab=11, embedding=4, hidden=6)
    text = torch.randint(0, 11, (3, 7))
    output = model(text)
    assert output.shape == (3, 7, 11)
    changed = text.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    same = (model(changed) == output).all(dim=-1)
    assert same[:, :4].all()
    assert not same[:, 4:].any()
