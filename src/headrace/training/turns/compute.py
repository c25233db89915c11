"""The first verb where sets of parameters take turns: the compute of the set whose turn it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headrace.metrics import Mean
from headrace.spec.job import Share
from headrace.spec.parameter_sets import TurnOrder
from headrace.training.compute import Compute, Computed


class TurnsCompute(Compute):
    """Runs the whole model, and differentiates in each round the loss of one set of parameters.

    `computes` are those of the sets, by name; each has the whole model as its `module`.
    """

    def __init__(self, computes: Mapping[str, Compute], order: TurnOrder) -> None:
        self._computes = computes
        self._order = order
        self._any = next(iter(computes.values()))
        self.module, self.device = self._any.module, self._any.device
        self.notes = tuple(dict.fromkeys(note for each in computes.values() for note in each.notes))

    def run(self, share: Share) -> Computed:
        return self._computes[self._order.at(share.round)].run(share)

    def backward(self, loss: Tensor | Mean, share: Share, adds: bool = False) -> Computed:
        return self._computes[self._order.at(share.round)].backward(loss, share, adds)

    def send(self, share: Share) -> None:
        self._computes[self._order.at(share.round)].send(share)

    def predict(self, batch: Any) -> Any:
        return self._any.predict(batch)
