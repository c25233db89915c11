"""A worker's part in meetings at which parameters are averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from headrace.averaging.outer_steps import OuterStep
from headrace.averaging.period import AutoPeriod, Period, Seen, first_period, next_period
from headrace.averaging.worker_average import ExtraState, WorkerAverage
from headrace.collectives.base import ProcessGroup
from headrace.errors import RunFailed, UsageError
from headrace.spec.model import ModelSpec
from headrace.training.clipping import all_finite
from headrace.training.gradients import FlatLayout
from headrace.training.optimizer_state import StatePiece
from headrace.training.synchronization import PeriodicSync, SyncResult
from headrace.training.update import PARAMETER, Updater

_OUTER = "headrace.outer"
"""Key of the pieces that hold what the outer step keeps."""
_LOST = "headrace.lost"
"""Key of the pieces that hold what a codec has lost of what was sent."""


@dataclass(frozen=True)
class AveragingConfig:
    """Attributes:
    period: rounds between two meetings, or the bounds of one that adapts.
    outer: the outer step.
    average_state: whether the optimizers' state is averaged, too.
    post_local: rounds at the beginning after each of which workers meet.
    """

    period: int | AutoPeriod
    outer: OuterStep
    average_state: bool
    post_local: int


def seated(
    module: nn.Module, model: ModelSpec, group: ProcessGroup, make: Callable[[FlatLayout], WorkerAverage]
) -> WorkerAverage:
    """Lets a module's trainable parameters lie where they are averaged, and what is kept begin with them."""
    average = make(FlatLayout(model.trainable))
    named = dict(module.named_parameters())
    for spec, view in zip(model.trainable, average.layout.views(average.own), strict=True):
        view.copy_(named[spec.name].data)
        named[spec.name].data = view
    average.begin()
    group.barrier()
    return average


def require_alike(module: nn.Module, model: ModelSpec, rank: int) -> None:
    """Refuses a module that is not of the run's model: its parameters would be averaged with others than their like.

    Raises:
        UsageError: it is not.
    """
    named = [each for each in module.named_parameters() if not each[1].is_meta]
    own = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named}
    run = {spec.name: (spec.shape, f"torch.{spec.dtype}") for spec in model.parameters}
    for name in [*run, *(own.keys() - run.keys())]:
        if own.get(name) != run.get(name):
            mine, theirs = (_form(name, each.get(name)) for each in (own, run))
            raise UsageError(
                f"rank {rank} has {mine}, and the run's model has {theirs}; the model must be alike on all workers, "
                "so let it depend on nothing but the job"
            )


def _form(name: str, form: tuple[tuple[int, ...], str] | None) -> str:
    return f"no {name}" if form is None else f"{name} of shape {list(form[0])} and type {form[1]}"


class ParameterAverager(PeriodicSync):
    """Args:
    habits: when, and what for.
    average: of the parameters, which lie in it.
    rest: averages what lies elsewhere.
    updater: of this worker's own steps.
    group: the workers.
    first: the round that the run begins with.

    Attributes:
        worth: what this worker's part of the last round was worth.
        kept_bytes: of what the outer step keeps, and of what the averages need.
    """

    def __init__(
        self,
        habits: AveragingConfig,
        average: WorkerAverage,
        rest: ExtraState | None,
        updater: Updater,
        group: ProcessGroup,
        first: int,
    ) -> None:
        self._habits = habits
        self._average = average
        self._rest = rest
        self._updater = updater
        self._group = group
        self._period = first_period(habits.period)
        self._met = first
        self._rounds = 0
        self._weight = 0.0
        self._exchange_s = 0.0
        self._left = self._looked = perf_counter()
        self._saved: Tensor | None = None
        self._swapped = False
        self.worth = 0.0
        self.kept_bytes = average.nbytes + (rest.nbytes if rest else 0)

    def coming(self, done: int) -> int:
        rounds = 1 if self._met < self._habits.post_local else self._period.rounds
        return max(done, self._met + rounds)

    def weigh(self, weight: float) -> None:
        self.worth = weight
        self._weight += weight
        self._rounds += 1

    def meet(self, done: int) -> SyncResult:
        began = perf_counter()
        if self._rest:
            self._rest.gather()
        self._average.publish()
        finite = all_finite([*self._average.elements, *(self._rest.elements if self._rest else ())])
        weights, train_s, exchange_s = self._agree(done, finite, began - self._left)
        measured = self._average.combine(weights)
        if self._rest:
            self._rest.combine(weights)
        # The second meeting: all parts of all copies are written.
        *squares, norm = self._group.sum([*measured.squares, measured.norm])
        self._average.take()
        if self._rest:
            self._rest.spread()
        if not finite:
            self._forget()
        drift = math.sqrt(max(squares) / norm) if norm else 0.0
        rounds, self._met = self._rounds, done
        self._rounds, self._weight = 0, 0.0
        if done >= self._habits.post_local:
            seen = Seen(max(1, rounds), train_s, exchange_s, drift)
            self._period = next_period(self._period, seen, self._habits.period)
        left_out = tuple(rank for rank, weight in enumerate(weights) if weight < 0)
        self._left = perf_counter()
        self._exchange_s = self._left - began
        return SyncResult(rounds, self.coming(done + 1) - done, self._period.why, drift, left_out)

    def end(self, done: int) -> SyncResult | None:
        return self.meet(done) if self._rounds and self._habits.outer.agrees else None

    def swap_weights(self, averaged: bool) -> None:
        if averaged == self._swapped:
            return
        self._swapped = averaged
        if not averaged:
            if self._saved is not None:
                self._average.own.copy_(self._saved)
                self._saved = None
            # Evaluations are no training, and make no exchange cheaper.
            self._left += perf_counter() - self._looked
            return
        self._looked = perf_counter()
        if self._rounds or not self._habits.outer.agrees:
            self._saved = self._average.own.clone()
            self._average.publish()
            finite = all_finite(self._average.elements)
            self._average.combine(self._agree(self._met + self._rounds, finite, 0.0)[0], look=True)
            self._group.barrier()
            self._average.take()

    def own(self) -> tuple[StatePiece, ...]:
        pieces = [
            piece for i, region in enumerate(self._average.lost) for piece in self._pieces(f"{_LOST}-{i}", region)
        ]
        if not self._habits.outer.agrees:
            pieces += self._pieces(PARAMETER, self._average.own)
        # What rank 0 has besides is what all begin with who find nothing of their own.
        alone = self._group.rank and not self._habits.average_state
        return (*pieces, *(self._updater.state() if alone else ()))

    def kept(self) -> tuple[StatePiece, ...]:
        """Returns what the outer step keeps, but for the parameters."""
        return tuple(
            piece
            for index, region in enumerate(self._average.kept[1:], 1)
            for piece in self._pieces(f"{_OUTER}-{index}", region)
        )

    def settings(self) -> dict[str, Any]:
        """Returns the period as JSON values."""
        return {"period": self._period.rounds, "most": self._period.most, "why": self._period.why}

    def load(self, pieces: Sequence[StatePiece], settings: Mapping[str, Any] | None) -> None:
        """Takes up what `kept` and `settings` returned; of a run that did not average there is nothing."""
        saved = (settings or {}).get("averaging")
        if saved and isinstance(self._habits.period, AutoPeriod):
            self._period = Period(int(saved["period"]), str(saved["why"]), int(saved["most"]))
        places = {f"{_OUTER}-{index}": region for index, region in enumerate(self._average.kept)}
        places |= {f"{_LOST}-{index}": region for index, region in enumerate(self._average.lost)}
        for piece in pieces:
            if piece.key in places:
                piece.copy_to(self._average.layout.flat(places[piece.key], piece.parameter), 0)
        # Where one region is everybody's, all have written the same into it.
        self._group.barrier()

    def _pieces(self, key: str, region: Tensor) -> list[StatePiece]:
        names = self._average.layout.names
        return [StatePiece(name, key, 0, self._average.layout.flat(region, name).clone()) for name in names]

    def _agree(self, done: int, finite: bool, train_s: float) -> tuple[list[float], float, float]:
        """Returns every copy's weight in the mean; the slowest worker's time since the last meeting, and the time that
        one took whoever came last to it. All ranks' parameters are written when it returns.

        Raises:
            RunFailed: no worker has finite parameters.
        """
        rank, world = self._group.rank, self._group.world
        # Each says its own among zeros, so that all know all.
        told = [0.0] * (3 * world)
        own = self._weight if self._habits.outer.weighted else 1.0
        told[3 * rank : 3 * rank + 3] = own if finite else -1.0, train_s, self._exchange_s
        told = self._group.sum(told)
        weights = told[::3]
        live = [weight for weight in weights if weight >= 0]
        if not live:
            raise RunFailed(
                f"after {done} rounds no worker has finite parameters; lower the learning rate, or use "
                "Options(clip_norm=1.0)"
            )
        total = sum(live)
        shares = [-1.0 if weight < 0 else weight / total if total else 1 / len(live) for weight in weights]
        return shares, max(told[1::3]), min(told[2::3])

    def _forget(self) -> None:
        """Begins with the optimizer anew: what has led here is as little worth as where it led."""
        if not self._habits.average_state:
            self._updater.load(())
