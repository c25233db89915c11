"""Which rows move between servers so that all have about the same load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EVEN = 1.05
"""A load of the busiest server, against the mean, below which nothing is moved."""


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """Rows that can be moved by themselves: [start, stop) of a table, and how often they were asked for.

    `held` of them have been changed, and would travel.
    """

    table: int
    start: int
    stop: int
    load: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """How many rows one server was asked for since the last time, and the pieces with most of it."""

    load: int
    pieces: tuple[LoadPiece, ...]


def choose_moves(loads: Sequence[ServerLoad], most: int = 128) -> list[tuple[LoadPiece, int, int]]:
    """Returns at most so many pieces, each with its server and where it moves to: the busiest one's to the idlest one.

    Each one is that which brings the two nearest to each other (as in longest-processing-time scheduling, Graham 1969).
    """
    now = [float(server.load) for server in loads]
    left = [sorted(server.pieces, key=lambda piece: piece.load) for server in loads]
    chosen: list[tuple[LoadPiece, int, int]] = []
    while len(chosen) < most:
        source, target = now.index(max(now)), now.index(min(now))
        gap = now[source] - now[target]
        fitting = [piece for piece in left[source] if 0 < piece.load < gap]
        if now[source] <= EVEN * sum(now) / len(now) or not fitting:
            return chosen
        piece = min(fitting, key=lambda piece: abs(gap / 2 - piece.load))
        left[source].remove(piece)
        now[source] -= piece.load
        now[target] += piece.load
        chosen.append((piece, source, target))
    return chosen


def unevenness(loads: Sequence[float]) -> float:
    """Returns the busiest server's load against the mean; 1.0 without any load."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
