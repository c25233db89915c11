"""What the shards of one server are: which piece of which parameter, of what shape and type."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.comm.port import Slots

__all__ = ["Form", "Piece"]


@dataclass(frozen=True)
class Piece:
    """A shard.

    Attributes:
        parameter: name of the parameter that it is a piece of.
        start: its first element of the flattened parameter.
        shape: of the piece.
        dtype: as in `torch.float32`.
    """

    parameter: str
    start: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """How people read of it: the parameter, and where in it."""
        return f"{self.parameter}@{self.start}" if self.start else self.parameter


class Form:
    """All shards of one server, in order.

    Attributes:
        pieces: by shard.
        slots: their places in bytes, for a port or a link.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self._dtypes = [getattr(torch, piece.dtype) for piece in pieces]
        self.slots = Slots([p.elements * d.itemsize for p, d in zip(self.pieces, self._dtypes, strict=True)])

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def names(self) -> tuple[str, ...]:
        """The shards' names."""
        return tuple(piece.name for piece in self.pieces)

    def view(self, shard: int, place: Tensor) -> Tensor:
        """Returns a place of `(bytes,)` uint8 as the shard that lies there."""
        return place.view(self._dtypes[shard]).view(self.pieces[shard].shape)

    def describe(self) -> bytes:
        """Returns what another process compares its own form with."""
        return json.dumps([[p.parameter, p.start, list(p.shape), p.dtype] for p in self.pieces]).encode()

    def difference(self, described: bytes) -> str:
        """Says in what another's form differs from this one; "" if in nothing.

        Raises:
            ValueError: these bytes describe no form.
        """
        own, other = json.loads(self.describe()), json.loads(described)
        if own == other:
            return ""
        if not isinstance(other, list):
            raise ValueError("a worker described no shards")
        at = next((i for i, (mine, its) in enumerate(zip(own, other, strict=False)) if mine != its), None)
        if at is None:
            return f"the worker's model has {len(other)} shards here and the server {len(own)}; build the same on both"
        return f"shard {at} is {_words(other[at])} in the worker, {_words(own[at])} on the server; build the same model"


def _words(piece: object) -> str:
    if isinstance(piece, list) and len(piece) == 4:
        return f"{piece[0]!s:.60}[{piece[1]!s:.20}:] of shape {piece[2]!s:.40} and type {piece[3]!s:.20}"
    return f"{piece!r:.80}"
