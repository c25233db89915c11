"""Workers that average their parameters, and of which some are lost, join and leave.

    worker 0   ░step░░step░ ┌──────┐ ░step░✗        ░step░░step░ ┌──────┐
    worker 1   ░step░░step░ │ mean │ ░lost          │            │ mean │
    worker 2   ░step░░step░ └──────┘ ░step░░step░✗  ░step░░step░ └──────┘
                                                    the rounds since the mean, by those that are left

What a lost worker has done since the last synchronization is lost with it. So the others do these rounds again, from
what they were at it: then every example has been trained on once, as if the worker had left at that synchronization.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from headrace.averaging.averager import OUTER, ParameterAverager, Stretch
from headrace.training.exchange import UpdatingExchange
from headrace.training.optimizer import StatePiece
from headrace.training.synchronization import ElasticState


class AveragedState(ElasticState):
    """The parameters and the optimizer of a worker that makes steps of its own, and what it has of the average."""

    def __init__(self, local: UpdatingExchange, averager: ParameterAverager, agrees: bool) -> None:
        self._local = local
        self._averager = averager
        self._agrees = agrees
        self._saved: tuple[list[Tensor], Stretch, tuple[StatePiece, ...], dict[str, Any]] | None = None

    @property
    def _regions(self) -> tuple[Tensor, ...]:
        average = self._averager.average
        return (average.local, *average.outer_state)

    def keep(self) -> None:
        regions = [region.clone() for region in self._regions]
        pieces = tuple(
            replace(piece, value=piece.flat.clone(), in_place=False) if piece.in_place else piece
            for piece in self._local.state()
        )
        self._saved = regions, self._averager.stretch, pieces, self._local.settings()

    def bring_back(self) -> None:
        assert self._saved is not None
        regions, self._averager.stretch, pieces, settings = self._saved
        for region, saved in zip(self._regions, regions, strict=True):
            region.copy_(saved)
        self._local.load(pieces, settings)

    def regroup(self) -> None:
        self._averager.average.regroup()
        if self._averager.extra:
            self._averager.extra.regroup()

    def give(self) -> tuple[StatePiece, ...]:
        averager = self._averager
        regions = enumerate(averager.average.outer_state)
        outer = (piece for index, region in regions for piece in averager.pieces(f"{OUTER}-{index}", region))
        return (*self._local.state(), *outer)

    def take(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any]) -> None:
        every, average = tuple(pieces), self._averager.average
        self._local.load(every, settings)
        self._averager.load(every, settings)
        if not self._agrees:
            # What the worker that gave them has beside are its own parameters.
            average.local.copy_(average.outer_state[0])
        average.begin()
        given = settings["averaging"]
        period = self._averager.stretch.period
        self._averager.stretch = Stretch(period, int(given["synced"]))
