"""What every synchronous strategy must train as one device does: small models, each difficult in its own way.

Everything that is sent to a worker process lives here, because a process can import this file by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from headrace.testing.jobs import (
    ADAM,
    BATCH,
    RARE_EVERY,
    SGD,
    SYNC,
    Case,
    Convolutional,
    Partial,
    asking,
    cross_entropy,
    dense,
    heavy_classes,
    images,
    linear,
    vectors,
)
from training.block_state import Blockwise

__all__ = [
    "ADAM",
    "BATCH",
    "COUNTS",
    "LAYERS",
    "MIXTURE",
    "MODELS",
    "RARE_EVERY",
    "SEQUENCES",
    "SGD",
    "SYNC",
    "VARIANTS",
    "Attending",
    "Bang",
    "Buffered",
    "Case",
    "Convolutional",
    "Doubling",
    "Idle",
    "Partial",
    "Recurrent",
    "Stacked",
    "Tied",
    "TwoHeads",
    "asking",
    "by_dimensions",
    "by_name",
    "cross_entropy",
    "dense",
    "explode_in_the_second_round",
    "first_head",
    "heavy_classes",
    "images",
    "linear",
    "matrices",
    "normalised",
    "padded_text",
    "sequences",
    "text",
    "vectors",
    "verb_by_verb",
    "without_padding",
]

COUNTS = {"even": 8, "uneven": 11, "tiny": 9}
"""Examples a data set, in batches of 4: the last has 4, 3, or 1, which leaves nothing for a second worker."""


class TwoHeads(nn.Module):
    """Returns two outputs, of which the loss takes one; the other ends in a BatchNorm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.other = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(torch.cat([x, -x]))
        half = len(hidden) // 2
        return self.head(hidden[:half] + hidden[half:]), self.other(hidden)


class Recurrent(nn.Module):
    """Predicts the next character: logits `(batch, characters, time)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 7)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(text))
        return self.head(states).transpose(1, 2)


class Tied(nn.Module):
    """One matrix embeds the characters and reads out the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(text)))).transpose(1, 2)


class Idle(nn.Module):
    """A frozen parameter that is used, one that is not used, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.body[0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Buffered(nn.Module):
    """A constant buffer, one that is not saved, and a counter that forward moves; a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.warmth = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0]))
        self.register_buffer("mask", torch.tensor([True, True, False]), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.warmth * self.body(x) * torch.where(self.mask, self.scale, 1.0)


class Attending(nn.Module):
    """Causal attention over the tokens of a sequence, whose places it counts; logits `(batch, classes, tokens)`."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(9, 4)
        self.mixed = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        query, key, value = (each.unflatten(-1, (2, 2)).transpose(1, 2) for each in self.mixed(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(self.norm(x + seen)).transpose(1, 2)


class Stacked(nn.Module):
    """Layers of a transformer, one behind the other; logits `(batch, classes, tokens)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(1, 2)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 3))


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


def sequences(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 7, 4), torch.randint(0, 3, (count, 7))


def text(count: int) -> tuple[Tensor, Tensor]:
    characters = torch.randint(0, 7, (count, 6))
    return characters[:, :-1].contiguous(), characters[:, 1:].contiguous()


def padded_text(count: int) -> tuple[Tensor, Tensor]:
    """Returns texts of 0 to 5 characters: where there is none, the target is -1."""
    characters, target = text(count)
    lengths = torch.arange(count) % 6
    return characters, torch.where(torch.arange(5) < lengths[:, None], target, -1)


def first_head(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target)


def without_padding(output: Tensor, target: Tensor) -> hr.Mean:
    real = target >= 0
    each = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return hr.Mean((each * real).sum(), real.sum())


MODELS: Mapping[str, Case] = {
    "mlp": Case(dense),
    "cnn": Case(Convolutional, images, options=SYNC),
    "lstm": Case(Recurrent, text),
    "tied": Case(Tied, text),
    "idle": Case(Idle),
    "buffers": Case(Buffered),
    "partial": Case(Partial),
}


class Mixture(nn.Module):
    """A mixture of four experts, of which each example has two."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            made = made.index_add(0, row, expert(x[row]) * weights[row, place, None])
        return self.head(x + made)


SEQUENCES, LAYERS, MIXTURE = Case(Attending, sequences), Case(Stacked, sequences), Case(Mixture)


def by_dimensions(named: Any) -> torch.optim.Optimizer:
    """Groups of plain tensors: decay for matrices alone."""
    tensors = [tensor for _, tensor in named]
    groups = [
        {"params": [tensor for tensor in tensors if tensor.ndim > 1], "weight_decay": 0.1},
        {"params": [tensor for tensor in tensors if tensor.ndim <= 1], "lr": 0.05},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def by_name(named: Any) -> torch.optim.Optimizer:
    """Groups of named tensors: the last layer learns slowly."""
    groups = [
        {"params": [(name, tensor) for name, tensor in named if name.startswith("0.")]},
        {"params": [(name, tensor) for name, tensor in named if not name.startswith("0.")], "lr": 0.01},
    ]
    return torch.optim.AdamW(groups, lr=0.05)


class Doubling(torch.optim.Optimizer):
    """A user's own optimizer, which writes to the gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensor.add_(tensor.grad.mul_(2), alpha=-group["lr"])


VARIANTS: Mapping[str, Case] = {
    "clipped": Case(dense, options=hr.Options(clip_norm=0.3)),
    "clipped-cnn": Case(Convolutional, images, options=hr.Options(clip_norm=0.3, batch_norm="sync")),
    "clipped-partial": Case(Partial, options=hr.Options(clip_norm=0.3)),
    "tokens": Case(Recurrent, padded_text, without_padding),
    "mean-cnn": Case(Convolutional, images, heavy_classes, options=SYNC),
    "mean-clipped": Case(dense, loss=heavy_classes, options=hr.Options(clip_norm=0.3)),
    "partial-normalised": Case(partial(Partial, normalised), options=SYNC),
    "unused-head": Case(TwoHeads, loss=first_head, options=SYNC),
    "groups-by-dimensions": Case(dense, optimizer=by_dimensions),
    "groups-by-name": Case(dense, optimizer=by_name),
    "nesterov-foreach": Case(dense, optimizer=partial(SGD, nesterov=True, foreach=True)),
    "own-optimizer": Case(dense, optimizer=partial(Doubling, lr=0.05)),
    "muon": Case(matrices, optimizer=partial(torch.optim.Muon, lr=0.02)),
    "muon-one-matrix": Case(partial(nn.Linear, 4, 3, bias=False), optimizer=partial(torch.optim.Muon, lr=0.02)),
    "adafactor": Case(dense, optimizer=partial(torch.optim.Adafactor, lr=0.05)),
    "blocks": Case(dense, optimizer=partial(Blockwise, lr=0.1)),
    "amsgrad-partial": Case(Partial, optimizer=partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.01)),
    "unfrozen-clipped": Case(hr.frozen(dense, "0.*", until_epoch=1), options=hr.Options(clip_norm=0.3)),
    "unfrozen-cnn": Case(
        hr.frozen(hr.frozen(Convolutional, "body.0.*", until_epoch=2), "body.[1-9].*", until_epoch=1),
        images,
        options=SYNC,
    ),
    "unfrozen-tied": Case(hr.frozen(Tied, "embedding.*", until_epoch=2), text, optimizer=ADAM),
}


def verb_by_verb(loss: Callable[..., Any], worker: hr.Worker) -> None:
    """A user's own loop, on every share, empty ones too."""
    for inputs, target in worker.batches():
        worker.backward(loss(worker.model(inputs), target))
        worker.update()
        if worker.epoch_ended:
            worker.evaluate()


class Bang(ValueError):
    """What a worker raises in these tests."""


def explode_in_the_second_round(worker: hr.Worker) -> None:
    """A loop whose last worker fails while the others wait for it."""
    for batch in worker.batches():
        if worker.round == 1 and worker.rank == worker.world - 1:
            raise Bang("something is wrong with this batch")
        worker.step(batch)
