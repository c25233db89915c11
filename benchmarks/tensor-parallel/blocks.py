"""What is trained: blocks of two dense layers, as in a transformer."""

from __future__ import annotations

from torch import nn

BLOCKS, BATCH = 4, 64


def blocks(width: int) -> nn.Sequential:
    """Returns blocks that widen `(batch, width)` fourfold and narrow it again."""
    layers = [(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(BLOCKS)]
    return nn.Sequential(*(layer for block in layers for layer in block))
