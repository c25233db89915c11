"""Models that are difficult to cut, each in its own way, with batches for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.models import char_lstm, cnn, fashion_cnn, mlp


class Residual(nn.Module):
    """A block that adds what it gets, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.linear(x))
        out += x
        return self.relu(out)


class Blocks(nn.Module):
    """A list of blocks in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class UNet(nn.Module):
    """Skips go from the way down to the way up, past the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.third, self.last = nn.Conv2d(8, 2, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.first(x))
        low = F.relu(self.second(self.pool(high)))
        deep = F.relu(self.middle(self.pool(low)))
        up = F.interpolate(deep, size=low.shape[2:])
        up = F.relu(self.third(torch.cat([up, low], 1)))
        up = F.interpolate(up, size=high.shape[-2:])
        return self.last(torch.cat([up, high], 1)).flatten(2)


class Several(nn.Module):
    """Two inputs by name, one of them for the end alone, and a tree of outputs, one of them from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, left: Tensor, scale: Tensor, names: Any = None) -> dict[str, Any]:
        hidden = torch.tanh(self.left(left))
        assert names is None
        return {"logits": self.head(self.right(hidden)) * scale, "others": (hidden, None)}


class Greedy(torch.autograd.Function):
    """Wants a petabyte for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.empty(1 << 50).sum()


class Tied(nn.Module):
    """One matrix embeds and reads out; a layer is called twice; dropout is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        once = torch.tanh(self.mix(self.embedding(text)))
        twice = F.dropout(self.mix(once), 0.5, self.training)
        return self.head(twice + once)


class Direct(nn.Module):
    """Parameters and buffers without layers, arithmetic of shapes, and a counter that forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        batch, features = x.shape
        self.calls += 1
        for weight in self.weights:
            x = torch.tanh(x @ weight).view(batch, features // 2, -1).reshape(len(x), -1)
        steps = torch.arange(batch, dtype=x.dtype) / batch
        return torch.where(self.mask, x * self.scale, steps[:, None])


class Attending(nn.Module):
    """Attention by hand and by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(16, 8))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 11)

    def forward(self, text: Tensor) -> Tensor:
        batch, time = text.shape
        x = self.embedding(text) + self.places[:time]
        q, k, v = self.qkv(x).view(batch, time, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, -1))
        return self.head(self.encoder(x))


class Stacked(nn.Module):
    """LSTMs whose states, several in a tuple, cross cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.first, self.second = (nn.LSTM(4, 4, batch_first=True) for _ in range(2))
        self.head = nn.Linear(4, 11)

    def forward(self, text: Tensor) -> Tensor:
        states, (hidden, cell) = self.first(self.embedding(text))
        states, _ = self.second(states, (hidden, cell))
        return self.head(states + hidden.transpose(0, 1))


class Normalised(nn.Module):
    """One BatchNorm layer is called twice, so that its statistics hold two layers together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.norm(self.first(x)))))


class Writing(nn.Module):
    """Writes into values that come from elsewhere: itself, and through a view whose owner is read later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = (nn.Linear(4, n) for n in (4, 2, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * 2
        hidden[:, :2] = self.second(hidden.tanh())
        more = hidden * 2
        view = more[:, 2:]
        view += self.third(hidden)
        return self.head(more)


class Gate(nn.Module):
    """What it does depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


class Gated(nn.Module):
    """Has submodules that can only be kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(4, 4), Gate(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.first(x).mean()
        return self.head(self.gate(self.first(x) - shift))


@dataclass(frozen=True)
class Case:
    """A model, and what it is called with.

    Attributes:
        model: builds it.
        batch: count of examples to a batch.
        kept: names of modules that are not looked into.
        partitions: about how many are tried for each number of stages.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    kept: tuple[str, ...] = ()
    partitions: int = 3


def vectors(count: int) -> Tensor:
    return torch.randn(count, 4)


def images(*shape: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, *shape)


def text(letters: int, count: int) -> Tensor:
    return torch.randint(0, letters, (count, 6))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 3))


ZOO: Mapping[str, Case] = {
    "mlp": Case(partial(mlp, 4, 8, 3), vectors),
    "cnn": Case(cnn, images(3, 32, 32), partitions=1),
    "fashion_cnn": Case(fashion_cnn, images(1, 12, 12)),
    "char_lstm": Case(partial(char_lstm, 11, 4, 8), partial(text, 11)),
    "dense": Case(dense, vectors),
    "blocks": Case(Blocks, vectors),
    "unet": Case(UNet, images(1, 8, 12)),
    "several": Case(Several, lambda count: {"left": torch.randn(count, 4), "scale": torch.rand(count, 1)}),
    "tied": Case(Tied, partial(text, 7)),
    "direct": Case(Direct, vectors),
    "attending": Case(Attending, partial(text, 11)),
    "stacked": Case(Stacked, partial(text, 11)),
    "normalised": Case(Normalised, vectors),
    "writing": Case(Writing, vectors),
    "gated": Case(Gated, vectors, ("Gate",)),
}
