"""What is trained: blocks of two dense layers, each a unit."""

from __future__ import annotations

from torch import nn

BLOCKS, EXAMPLES_A_WORKER = 8, 32


def stack(width: int) -> nn.Sequential:
    """Returns blocks that widen `(batch, width)` fourfold and narrow it again."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(BLOCKS))
    )


def block_bytes(width: int) -> int:
    """Returns the bytes of one block's parameters."""
    return 4 * (8 * width * width + 5 * width)
