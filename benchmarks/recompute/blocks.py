"""A stack of a transformer's blocks, and a batch for it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from transformer_block import Block

HEADS, BLOCKS, EXAMPLES = 8, 8, 8
LARGE, TINY = (256, 96), (16, 2)
"""Width and tokens; a process with the tiny ones shows what Python, torch and what they import take."""


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, HEADS) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(width: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(EXAMPLES, tokens, width, generator=generator) for _ in range(2))
    return x, y
