"""The first verb: from a share of the global batch to gradients, and from inputs to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headrace.spec.share import Share

__all__ = ["Compute", "Computed"]


@dataclass(frozen=True)
class Computed:
    """What came out of a step's compute.

    Attributes:
        loss: the mean over this worker's share, detached, on its device; None where the share was empty.
        weight: what that loss weighs in the mean over the global batch.
    """

    loss: Tensor | None
    weight: float


class Compute(ABC):
    """Runs a model, whole, staged or split."""

    module: nn.Module

    @abstractmethod
    def run(self, share: Share) -> Computed:
        """Leaves this share's contribution to the gradient of the global batch's mean loss with the exchange."""

    @abstractmethod
    def predict(self, batch: Any) -> Any:
        """Returns the model's output for a batch, without gradients."""

    @abstractmethod
    def place(self, batch: Any) -> Any:
        """Returns a batch on the model's device."""
