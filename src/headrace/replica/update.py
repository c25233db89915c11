"""Parts of the update verb that the exchanges of several strategies share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headrace.replica.exchange import StatePiece
from headrace.replica.optimizer import load_state, state_bytes, state_pieces
from headrace.spec.plan import Segment

__all__ = ["Updater", "clip_coefficient", "squared_norm"]


class Updater:
    """An optimizer together with the pieces of the parameters that this process updates.

    Args:
        optimizer: built over the tensors of `owned`.
        owned: the pieces, in the plan's order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owned: Sequence[tuple[Segment, Tensor]]) -> None:
        self.optimizer = optimizer
        self._owned = tuple(owned)

    def state(self) -> tuple[StatePiece, ...]:
        """Returns the optimizer's state, piece by piece."""
        return state_pieces(self.optimizer, self._owned)

    def load(self, pieces: Iterable[StatePiece]) -> None:
        """Takes up what belongs to the owned pieces."""
        load_state(self.optimizer, self._owned, pieces)

    def state_bytes(self) -> int:
        """Returns the bytes of the optimizer's state."""
        return state_bytes(self.optimizer)


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Returns the sum of squares of all elements, in double precision."""
    return sum(
        float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors if tensor.numel()
    )


def clip_coefficient(clip_norm: float, squared: float) -> float:
    """Returns what gradients of a squared norm are multiplied by, as torch's `clip_grad_norm_` does."""
    return min(1.0, clip_norm / (math.sqrt(squared) + 1e-6))
