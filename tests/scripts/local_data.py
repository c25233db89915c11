"""Small data for the scripts, made by fixed numbers: drawing it takes nothing from the script's own random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def images(count: int, size: int = 8, channels: int = 1, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns noisy pictures of a few patterns, `count` x channels x size x size between 0 and 1, and their classes."""
    drawn = torch.Generator().manual_seed(7)
    patterns = torch.rand(classes, channels, size, size, generator=drawn)
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=drawn)
    noise = torch.rand(count, channels, size, size, generator=drawn)
    return (0.7 * patterns[labels] + 0.3 * noise), labels


def tokens(count: int, vocabulary: int = 17, seed: int = 0) -> Tensor:
    """Returns a text of `count` numbers of words, each of which tells something of the next."""
    drawn = torch.Generator().manual_seed(seed)
    jumps = torch.randint(1, 4, (count,), generator=drawn)
    return jumps.cumsum(0) % vocabulary
