"""What does not compute each token alone is refused before the start, by name; what does is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.context_parallel.verification import verify
from headrace.errors import DataError, UsageError

TOKENS, WIDTH = 40, 8


class Between(nn.Module):
    """Calls a function of hidden states and layers."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


def model(function: Callable[..., Any], *layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, WIDTH), Between(function, *layers), nn.Linear(WIDTH, 2)).double()


def attention(x: Tensor, **how: Any) -> Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, **how).transpose(1, 2).flatten(2)


def tried(module: nn.Module, given: Tensor | None = None) -> object:
    torch.manual_seed(0)
    given = torch.randn(2, TOKENS, 3, dtype=torch.float64) if given is None else given
    before = copy.deepcopy(module.state_dict())
    own = F.scaled_dot_product_attention, torch.arange, torch.get_rng_state()
    try:
        return verify(module, (given, torch.zeros(2)), None)
    finally:
        assert F.scaled_dot_product_attention is own[0]
        assert torch.arange is own[1]
        assert torch.equal(torch.get_rng_state(), own[2])
        assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())


def in_time(x: Tensor, layer: nn.Module) -> Tensor:
    y: Tensor = layer(x.mT)
    return y.mT


def encoder(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True)


def causal(tokens: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(tokens, dtype=torch.float64)


def self_attending(**how: Any) -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True, **how)


ALONE = {
    "nothing": model(lambda x: x),
    "attention": model(attention),
    "causal attention": model(lambda x: attention(x, is_causal=True)),
    "torch's attention": model(lambda x, layer: layer(x, x, x, need_weights=False)[0], self_attending()),
    "torch's encoder": model(lambda x, layer: layer(x), encoder()),
    "a causal encoder": model(
        lambda x, layer: layer(x, mask=causal(x.shape[1]), is_causal=True), nn.TransformerEncoder(encoder(), 2)
    ),
    "a convolution of one token": model(in_time, nn.Conv1d(WIDTH, WIDTH, 1)),
    "tokens as examples": model(lambda x, layer: layer(x.flatten(0, 1)).view_as(x), nn.Linear(WIDTH, WIDTH)),
    "dropout": model(lambda x, layer: layer(x), nn.Dropout(0.5)),
    "counted places": model(lambda x, table: x + table(torch.arange(x.shape[1])), nn.Embedding(TOKENS, WIDTH)),
    "counted and other numbers": model(
        lambda x: (
            x
            + torch.arange(0, x.shape[1], dtype=x.dtype)[:, None]
            # At another line.
            + torch.arange(WIDTH)
        )
    ),
}


@pytest.mark.parametrize("name", sorted(ALONE))
def test_what_computes_each_token_alone_is_taken(name: str) -> None:
    tried(ALONE[name])


LOOKS = {
    "a convolution": (model(in_time, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), r"'1\.layers\.0' \(Conv1d\) does not"),
    "a recurrence": (
        model(lambda x, layer: layer(x)[0], nn.LSTM(WIDTH, WIDTH, batch_first=True)),
        r"\(LSTM\) does not",
    ),
    "a batch's statistics": (model(in_time, nn.BatchNorm1d(WIDTH)), r"\(BatchNorm1d\) does not"),
    "statistics of tokens as examples": (
        model(lambda x, layer: layer(x.flatten(0, 1)).view_as(x), nn.BatchNorm1d(WIDTH)),
        r"\(BatchNorm1d\) does not",
    ),
    "a norm over time": (model(in_time, nn.GroupNorm(2, WIDTH)), r"\(GroupNorm\) does not"),
    "a layer over time": (model(in_time, nn.Linear(TOKENS, TOKENS)), r"\(Linear\) fails on 20 of 40 tokens"),
    "a mean": (model(lambda x: x - x.mean(1, keepdim=True)), r"'1' \(Between\) does not"),
    "the next token": (model(lambda x: x.roll(-1, 1)), r"'1' \(Between\) does not"),
    "a table of places": (
        model(lambda x, table: x + table.weight[: x.shape[1]], nn.Embedding(TOKENS, WIDTH)),
        r"'1' \(Between\) does not",
    ),
    "its own attention": (model(lambda x: (x @ x.mT).softmax(-1) @ x), r"'1' \(Between\) does not"),
    "torch's attention with weights": (
        model(lambda x, layer: layer(x, x, x)[0], self_attending()),
        r"\(MultiheadAttention\) does not",
    ),
    "a mask of pairs": (
        model(lambda x, layer: layer(x, src_mask=causal(x.shape[1]), is_causal=False), encoder()),
        r"self_attn' \(MultiheadAttention\): .*is_causal=True in its place",
    ),
    "dropped pairs": (model(lambda x, layer: layer(x), encoder(0.1)), r"self_attn.*dropout_p=0\.1"),
    "noise": (model(lambda x: x + torch.randn_like(x)), r"'1' \(Between\) does not"),
    "one vector an example": (model(lambda x: x.mean(1)), "one entry for each token"),
    "the last token": (model(lambda x: x[:, -1]), "one entry for each token"),
    "a token that the model adds": (
        model(lambda x: attention(torch.cat([x[:, :1] * 0, x], 1))[:, 1:]),
        r"'1' \(Between\): .*7 queries",
    ),
    "other keys": (
        model(lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None, :2], x[:, None, :2])[:, 0]),
        "6 queries and 2 keys",
    ),
}


@pytest.mark.parametrize("name", sorted(LOOKS))
def test_what_looks_at_other_tokens_is_refused_by_name(name: str) -> None:
    module, words = LOOKS[name]
    with pytest.raises(UsageError, match=words):
        tried(module)


def test_a_gradient_of_other_tokens_is_seen_where_outputs_are_the_same() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0].mean(1, keepdim=True).expand_as(gradients[0])

    with pytest.raises(UsageError, match=r"the gradient of '0\.weight' changes"):
        tried(model(lambda x: Straight.apply(x)))  # type: ignore[no-untyped-call]


def test_a_buffer_of_other_tokens_is_seen() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.total += x.detach().sum()
            y: Tensor = self.layer(x)
            return y

    with pytest.raises(UsageError, match="writes to the buffer 'total'"):
        tried(Counting(), torch.randn(2, TOKENS, 3))


def test_numbers_that_are_the_tokens_and_others_at_one_place_are_refused() -> None:
    def numbers(count: int) -> Tensor:
        return torch.arange(count)

    both = model(lambda x: x + numbers(x.shape[1])[:, None] + numbers(WIDTH))
    with pytest.raises(UsageError, match="counts tokens, and other things, too"):
        tried(both)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_part_is_refused() -> None:
    module = model(lambda x: x)
    module[1].compile()
    with pytest.raises(UsageError, match=r"'1' \(Between\) is compiled"):
        tried(module)


def test_a_model_for_one_length_is_tried_on_that() -> None:
    def exactly(x: Tensor, layer: nn.Module) -> Tensor:
        assert x.shape[1] in (TOKENS, TOKENS // 2)
        y: Tensor = layer(x)
        return y

    tried(model(exactly, nn.Linear(WIDTH, WIDTH)))


@pytest.mark.parametrize("tokens", [4, 5, 6, 13, 27])
def test_short_sequences_are_tried_too(tokens: int) -> None:
    tried(ALONE["counted places"], torch.randn(2, tokens, 3, dtype=torch.float64))
    with pytest.raises(UsageError, match="does not compute each token alone"):
        tried(LOOKS["a mean"][0], torch.randn(2, tokens, 3, dtype=torch.float64))


def test_what_has_no_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="no tensor with two dims"):
        verify(nn.Linear(1, 1), (torch.zeros(2), torch.zeros(2)), None)
    with pytest.raises(UsageError, match="2 tokens"):
        verify(nn.Linear(2, 1), (torch.zeros(3, 2), torch.zeros(3)), None)
    with pytest.raises(DataError, match=r"the model's input\[1\]\['other'\] has the shape \(2, 9\)"):
        verify(nn.Linear(2, 1), {"input": torch.zeros(2, 7), "other": torch.zeros(2, 9)}, None)
