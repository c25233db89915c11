"""Small models whose buffers learn, whose parts keep a mode, whose tensors have rare types, or that look at a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from hard_models import CLASSES, LENGTH, WIDTH, WORDS, Between
from torch import Tensor, nn

import headrace as hr


class Codebook(nn.Module):
    """Vector quantisation; the codes are buffers that follow the inputs."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        if self.training:
            counts = F.one_hot(nearest, 4).to(x.dtype)
            means = counts.T @ x.detach() / counts.sum(0).clamp(min=1)[:, None]
            self.codes.lerp_(torch.where(counts.sum(0)[:, None] > 0, means, self.codes), 0.2)
        return x + (self.codes[nearest] - x).detach()


class Target(nn.Module):
    """A network and a slow copy of it (BYOL, MoCo), which moves in forward; as buffers or as frozen parameters."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.online = nn.Linear(WIDTH, WIDTH)
        copy = self.online.weight.detach().clone()
        if buffers:
            self.register_buffer("slow", copy)
        else:
            self.slow = nn.Parameter(copy, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.lerp_(self.online.weight, 0.1)
        return torch.tanh(self.online(x)) + F.linear(x, self.slow)


class Queue(nn.Module):
    """A queue of earlier examples (MoCo), with an integer buffer that says where the next one goes."""

    keys: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.randn(6, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        out = hidden + (hidden @ self.keys.clone().T).softmax(-1) @ self.keys.clone()
        if self.training:
            rows = (self.place + torch.arange(len(x))) % len(self.keys)
            self.keys[rows] = hidden.detach()
            self.place.add_(len(x)).remainder_(len(self.keys))
        return out


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.reshape(-1, 2, WIDTH // 2)).reshape(-1, WIDTH)
        return out


class Frozen(nn.Module):
    """Keeps its BatchNorm in eval mode, whatever mode it is put into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.inner(x))
        return out


class Modes(nn.Module):
    """Does something else in train mode, so that a model that trains in eval mode is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * (2.0 if self.training else 1.0)
        return out


def in_eval_mode() -> nn.Module:
    return Between(Modes()).eval()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


class Half(nn.Module):
    """A block of half precision in a model of double precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.inner = nn.Linear(WIDTH, WIDTH)
        # Half precision has no room for a small update of a large weight.
        nn.init.zeros_(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.to(self.dtype))
        return out.to(x.dtype)


def half(dtype: torch.dtype) -> nn.Module:
    model = Between(Half(dtype)).double()
    model.block.to(dtype)
    return model


class Whole(nn.Module):
    """Has buffers of integers and truths; `counts` lets forward count its calls."""

    mask: Tensor
    order: Tensor
    calls: Tensor

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.counts = counts
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("order", torch.arange(WIDTH).flip(0).to(torch.int32))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.training:
            self.calls += 1
        hidden: Tensor = self.inner(x)[:, self.order]
        return hidden.masked_fill(~self.mask, 0.0)


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        return hidden - hidden.mean(0)


class Language(nn.Module):
    """Says for every token which one it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(self.embedding(words))))
        return out


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    words = batch["words"]
    return words.masked_fill(torch.arange(LENGTH) >= batch["lengths"][:, None], -100)


def over_tokens(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean over the tokens of a batch that are no padding."""
    return F.cross_entropy(output.flatten(0, 1), _labels(batch).flatten(), ignore_index=-100)


def weighed_tokens(output: Tensor, batch: Mapping[str, Tensor]) -> hr.Mean:
    """The same, with its weight."""
    labels = _labels(batch).flatten()
    total = F.cross_entropy(output.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return hr.Mean(total, (labels != -100).sum())


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Compares each example with all others of the batch."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


class Contrastive(nn.Module):
    """CLIP with its own loss, which compares all pairs of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch, return_loss=True)
