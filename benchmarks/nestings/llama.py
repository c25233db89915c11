"""A Llama-shaped model that every strategy can divide: its layers, its heads, its tokens; and a mixture of it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from routing import mixed

LAYERS, WIDTH, HIDDEN, HEADS, WORDS, TOKENS = 4, 32, 64, 4, 48, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            made.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for made in (self.q(x), self.k(x), self.v(x))
        )
        rates = 10_000.0 ** -(torch.arange(0, self.head_dim, 2, dtype=x.dtype, device=x.device) / self.head_dim)
        angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * rates
        cos, sin = torch.cat([angles, angles], 1).cos(), torch.cat([angles, angles], 1).sin()
        mixed = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return mixed(x, self.router, self.experts)


class Block(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.attention = Attention()
        self.feed_forward = Mixture() if mixture else FeedForward()
        self.first_norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class Llama(nn.Module):
    """Takes tokens, `(examples, TOKENS)`, and returns logits of the next ones."""

    def __init__(self, mixture: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(mixture) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(tokens))))


def llama(mixture: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Llama(mixture).double()
