"""Metrics of torchmetrics as users write them, most of which cannot be computed over workers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanOfMeans(Metric):
    """Its state is a mean over workers, whatever they have."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        count = self.update_count
        self.mean = (self.mean * (count - 1) + predictions[:, 0].mean()) / count

    def compute(self) -> Tensor:
        return self.mean


class Listed(Metric):
    """Its state is a list that is not joined."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=None)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.values.append(predictions.mean())

    def compute(self) -> Tensor:
        return torch.stack(self.values).mean()


class OfFirst(Metric):
    """Its state depends on what is a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.largest = self.largest + predictions.max() / len(predictions)

    def compute(self) -> Tensor:
        return self.largest


class Extremes(Metric):
    """Its state is infinite at first, and then large: no mean."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.add_state("best", torch.tensor(-math.inf if reduce == "max" else math.inf), dist_reduce_fx=reduce)
        self._reduce = getattr(torch, reduce)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.best = self._reduce(torch.stack([self.best, self._reduce(predictions) * 1e6]))

    def compute(self) -> Tensor:
        return self.best
