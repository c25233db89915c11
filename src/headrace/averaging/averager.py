"""Workers that step on their own and average their parameters: the synchronization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headrace.averaging.local_steps import LocalStepsSync
from headrace.averaging.outer_steps import OuterStep
from headrace.averaging.worker_average import ExtraState, WorkerAverage
from headrace.collectives.base import ProcessGroup
from headrace.devices import HOST
from headrace.errors import RunFailed, UsageError
from headrace.policies.period import AutoPeriod, Measured, Period, first_period, next_period
from headrace.spec.model import ModelSpec
from headrace.training.clipping import all_finite
from headrace.training.gradients import FlatLayout
from headrace.training.optimizer import StatePiece
from headrace.training.synchronization import SyncResult
from headrace.training.update import PARAMETER, Updater

OUTER = "headrace.outer"
"""Key of the pieces that hold what the outer step keeps."""
_LOST = "headrace.lost"
"""Key of the pieces that hold what a codec has lost of what was sent."""


@dataclass(frozen=True)
class AveragingConfig:
    """When workers average, and what.

    `period` is the rounds between two synchronizations, or the bounds of a period that adapts; in the first
    `post_local` rounds of a run workers synchronize after each. If `reset_state`, each worker's optimizer begins anew
    after one.
    """

    period: int | AutoPeriod
    outer: OuterStep
    average_state: bool
    post_local: int
    reset_state: bool = False


def place_in_average(
    module: nn.Module, model: ModelSpec, group: ProcessGroup, make: Callable[[FlatLayout], WorkerAverage]
) -> WorkerAverage:
    """Moves a module's trainable parameters to where they are averaged; what is kept begins as a copy of them."""
    average = make(FlatLayout(model.trainable))
    named = dict(module.named_parameters())
    for spec, view in zip(model.trainable, average.layout.views(average.local), strict=True):
        view.copy_(named[spec.name].data)
        named[spec.name].data = view
    average.begin()
    group.barrier()
    return average


def require_alike(module: nn.Module, model: ModelSpec, rank: int) -> None:
    """Raises UsageError if a module is not the run's model: its parameters would be averaged with different ones."""
    named = [entry for entry in module.named_parameters() if not entry[1].is_meta]
    here = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named}
    run = {spec.name: (spec.shape, f"torch.{spec.dtype}") for spec in model.parameters}
    for name in [*run, *(here.keys() - run.keys())]:
        if here.get(name) != run.get(name):
            mine, theirs = (_form(name, forms.get(name)) for forms in (here, run))
            raise UsageError(
                f"rank {rank} has {mine}, and the run's model has {theirs}; the model must be alike on all workers, "
                "so let it depend on nothing but the job"
            )


def _form(name: str, form: tuple[tuple[int, ...], str] | None) -> str:
    return f"no {name}" if form is None else f"{name} of shape {list(form[0])} and type {form[1]}"


@dataclass(frozen=True)
class Stretch:
    """The rounds since the last synchronization, which was after `synced` rounds of the run.

    `weight` is that of this worker's examples in them; the next synchronization is after `period`.
    """

    period: Period
    synced: int
    rounds: int = 0
    weight: float = 0.0


class ParameterAverager(LocalStepsSync):
    """Averages the workers' parameters, which lie in `average`, and their extra state.

    `updater` makes this worker's own steps; `first` is the round that the run begins with.
    """

    def __init__(
        self,
        config: AveragingConfig,
        average: WorkerAverage,
        extra: ExtraState | None,
        updater: Updater,
        group: ProcessGroup,
        first: int,
    ) -> None:
        self._config = config
        self.average = average
        self.extra = extra
        self._updater = updater
        self._group = group
        self.stretch = Stretch(first_period(config.period), first)
        self._exchange_s = 0.0
        self._left_s = self._swapped_s = perf_counter()
        self._saved: Tensor | None = None
        self._swapped = False
        self.own_optimizers = not config.average_state
        self.kept_bytes = average.nbytes + (extra.nbytes if extra else 0)

    def coming(self, done: int) -> int:
        synced = self.stretch.synced
        rounds = 1 if synced < self._config.post_local else self.stretch.period.rounds
        return max(done, synced + rounds)

    def weigh(self, weight: float) -> None:
        self.worth = weight
        now = self.stretch
        self.stretch = replace(now, rounds=now.rounds + 1, weight=now.weight + weight)

    def synchronize(self, done: int) -> SyncResult:
        began_s = perf_counter()
        if self.extra:
            self.extra.gather()
        self.average.publish()
        finite = all_finite([*self.average.elements, *(self.extra.elements if self.extra else ())])
        weights, train_s, exchange_s = self._agree(done, finite, began_s - self._left_s)
        self._follow_rate()
        sums = self.average.combine(weights)
        if self.extra:
            self.extra.combine(weights)
        # The second barrier: all parts of all copies are written.
        *squares, norm = self._group.sum([*sums.squares, sums.norm])
        self._group.commit()
        self.average.apply()
        self.average.take()
        if self.extra:
            self.extra.spread()
        if self._config.reset_state or (not finite and not self._config.average_state):
            # A state that has led to parameters that are not finite is dropped with them.
            self._updater.load(())
        drift = math.sqrt(max(squares) / norm) if norm else 0.0
        rounds, period = self.stretch.rounds, self.stretch.period
        if done >= self._config.post_local:
            measured = Measured(max(1, rounds), train_s, exchange_s, drift)
            period = next_period(period, measured, self._config.period)
        self.stretch = Stretch(period, done)
        members = self._group.members
        left_out = tuple(members[rank] for rank, weight in enumerate(weights) if weight < 0)
        self._left_s = perf_counter()
        self._exchange_s = self._left_s - began_s
        return SyncResult(rounds, self.coming(done + 1) - done, period.why, drift, left_out)

    def end(self, done: int) -> SyncResult | None:
        return self.synchronize(done) if self.stretch.rounds and self._config.outer.agrees else None

    def swap_weights(self, averaged: bool) -> None:
        if averaged == self._swapped:
            return
        if not averaged:
            self._swapped = False
            if self._saved is not None:
                self.average.local.copy_(self._saved)
                self._saved = None
            # Time in evaluations does not count as training, which an exchange is compared with.
            self._left_s += perf_counter() - self._swapped_s
            return
        self._swapped_s = perf_counter()
        if self.stretch.rounds or not self._config.outer.agrees:
            # A device has no room for it.
            self._saved = self.average.local.to(HOST, copy=True)
            self.average.publish()
            finite = all_finite(self.average.elements)
            weights, _, _ = self._agree(self.stretch.synced + self.stretch.rounds, finite, 0.0)
            self._follow_rate()
            self.average.combine(weights, preview=True)
            self._group.barrier()
            self.average.apply()
            self.average.take()
        # Last: where a worker is lost before, the others begin again.
        self._swapped = True

    def own(self) -> tuple[StatePiece, ...]:
        pieces = [piece for i, region in enumerate(self.average.lost) for piece in self.pieces(f"{_LOST}-{i}", region)]
        if not self._config.outer.agrees:
            pieces += self.pieces(PARAMETER, self.average.local)
        return (*pieces, *(self._updater.state() if self._group.rank and self.own_optimizers else ()))

    def kept(self) -> tuple[StatePiece, ...]:
        regions = list(enumerate(self.average.outer_state))
        # The first begins as the parameters, which most outer steps have all workers go on from.
        if regions and (not self._config.outer.agrees or torch.equal(regions[0][1], self.average.local)):
            del regions[0]
        return tuple(piece for index, region in regions for piece in self.pieces(f"{OUTER}-{index}", region))

    def settings(self) -> dict[str, Any]:
        return {"averaging": {**self.stretch.period.settings(), "synced": self.stretch.synced}}

    def load(self, pieces: Sequence[StatePiece], settings: Mapping[str, Any] | None) -> None:
        period = self.stretch.period.restored(settings, self._config.period) or self.stretch.period
        self.stretch = replace(self.stretch, period=period)
        places = {f"{OUTER}-{index}": region for index, region in enumerate(self.average.outer_state)}
        places |= {f"{_LOST}-{index}": region for index, region in enumerate(self.average.lost)}
        for piece in pieces:
            if piece.key in places:
                piece.copy_to(self.average.layout.view(places[piece.key], piece.parameter), 0)
        if self._group.fixed:
            # Where all ranks share one region, all have written the same into it.
            self._group.barrier()

    def pieces(self, key: str, region: Tensor) -> list[StatePiece]:
        """Returns what a region has of each parameter."""
        layout = self.average.layout
        return [StatePiece.of(name, key, 0, layout.view(region, name)) for name in layout.names]

    def _follow_rate(self) -> None:
        """Gives the outer step the workers' learning rate, if it follows that."""
        if not self._config.outer.follows_rate:
            return
        now = [group["lr"] for group in self._updater.optimizer.param_groups if "lr" in group]
        rates = set(map(float, self._updater.schedule.used or now))
        if len(rates) != 1:
            raise UsageError(
                f"{self._config.outer!r} follows the workers' learning rate, and their optimizer has "
                f"{', '.join(f'{rate:g}' for rate in sorted(rates)) or 'none'}; give the step a rate of its own, or "
                "use hr.Momentum()"
            )
        self.average.outer = self._config.outer.at_rate(*rates)

    def _agree(self, done: int, finite: bool, train_s: float) -> tuple[list[float], float, float]:
        """Returns every copy's weight in the mean, the slowest worker's time since the last synchronization, and the
        time that one took the worker that came last to it. All ranks' parameters are written when it returns.
        """
        weight = self.stretch.weight if self._config.outer.weighted else 1.0
        every = self._group.gather_numbers([weight if finite else -1.0, train_s, self._exchange_s])
        weights = [weight for weight, _, _ in every]
        live = [weight for weight in weights if weight >= 0]
        if not live:
            raise RunFailed(
                f"after {done} rounds no worker has finite parameters; lower the learning rate, or use "
                "Options(clip_norm=1.0)"
            )
        total = sum(live)
        shares = [-1.0 if weight < 0 else weight / total if total else 1 / len(live) for weight in weights]
        return shares, max(trained_s for _, trained_s, _ in every), min(exchanged_s for _, _, exchanged_s in every)
