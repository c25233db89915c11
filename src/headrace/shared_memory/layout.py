"""How parts lie beside each other in memory that processes share: each begins on a cache line of its own."""

from __future__ import annotations

from collections.abc import Sequence

LINE = 64
"""Bytes of a cache line."""


def on_lines(nbytes: int) -> int:
    """Returns the length of the cache lines that so many bytes take."""
    return -(-nbytes // LINE) * LINE


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where parts of so many bytes begin that lie one after the other, and where the last ends."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += on_lines(size)
    return begins, end
