"""A transformer's blocks, of which forward keeps much for backward, and a batch for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS, BLOCKS, EXAMPLES = 8, 8, 8
LARGE, TINY = (256, 96), (16, 2)
"""Width and tokens; a process with the tiny ones shows what Python, torch and what they import take."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        mixed = self.mixed(self.first(x)).view(count, length, 3, HEADS, width // HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        made: Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return made


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(width: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(EXAMPLES, tokens, width, generator=generator) for _ in range(2))
    return x, y
