"""The exchange of synchronous data parallelism, but for how the workers' gradients are summed."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from headrace.training.clipping import GradientClipper, StepDecision
from headrace.training.exchange import UpdatingExchange
from headrace.training.gradients import GradientUse, assign
from headrace.training.optimizer import StatePiece
from headrace.training.update import Updater

Reduced = tuple[Sequence[Tensor], Sequence[Tensor]]
"""What this rank measures of the summed gradients (all ranks together measure every element once), and what it changes
where clipping changes the sum."""


class ReducingExchange(UpdatingExchange):
    """Synchronous data parallelism: sums the workers' gradients, clips the sum, updates, publishes the parameters.

    A strategy says how the gradients are summed (`reduce`) and how the others get new parameters (`publish`).

    Args:
        updater, clipper: of this rank's parameters; the clipper decides with the other ranks.
        used: tells which parameters have a gradient; a parameter that no worker has one for is not updated.
        parameters: what this rank updates.
        gradients: where `reduce` leaves the sum for each of them.
        parameter_bytes: what this rank adds to the host for parameters.
        indices: which of the trainable parameters each belongs to; None where they are all of them.
    """

    def __init__(
        self,
        updater: Updater,
        clipper: GradientClipper,
        used: GradientUse,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        parameter_bytes: int,
        indices: Sequence[int] | None = None,
    ) -> None:
        self.updater = updater
        self.parameter_bytes = parameter_bytes
        self._clipper = clipper
        self.defers = clipper.defers
        self._parameters = parameters
        self._indices = range(len(parameters)) if indices is None else indices
        self._attach(used, gradients)

    def _attach(self, used: GradientUse, gradients: Sequence[Tensor]) -> None:
        self._used = used
        self._gradients = gradients
        self.gradient_bytes = sum(each.nbytes for each in gradients)
        self._missing: tuple[int, ...] = ()
        self._put()

    def _put(self) -> None:
        """Puts the sums into `.grad`, for the optimizer."""
        missing = [i for i, index in enumerate(self._indices) if index in self._missing]
        assign(self._parameters, self._gradients, missing)

    @abstractmethod
    def reduce(self) -> Reduced:
        """Sums the gradients that all workers have stored."""

    def publish(self) -> None:
        """Brings the parameters that this rank has changed to the others; returns when it has all of theirs."""

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        missing = self._used.settle()
        measured, held = self.reduce()
        decision = self._clipper.clip(measured, held, finite)
        if missing != self._missing or self._are_elsewhere():
            self._missing = missing
            self._put()
        return decision

    def _are_elsewhere(self) -> bool:
        # `worker.backward` of a loop of the user's own leaves this worker's gradients there, and sends them.
        present = (place for place, index in enumerate(self._indices) if index not in self._missing)
        return any(self._parameters[place].grad is not self._gradients[place] for place in itertools.islice(present, 1))

    def update(self, round_: int) -> None:
        super().update(round_)
        self.publish()
        self._used.leave()

    def skip(self, round_: int) -> None:
        super().skip(round_)
        self._used.leave()

    def swap_weights(self, averaged: bool) -> None:
        super().swap_weights(averaged)
        self.publish()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        super().load(pieces, settings)
        self.publish()
