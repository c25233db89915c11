"""Central storage whose workers may be lost, join and leave: what a lost one held is in memory that the others see.

update 7   rank 0   │ keep slice 0 ─ optimizer ─┐             ┌─ all have passed: it counts
           rank 1   │ keep slice 1 ─ optimizer ─┴─ barrier ─ ─┤
                                                              └─ rank 1 is lost: rank 0 goes on with all slices, as
                                                                 they were kept, and the round comes again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.internals import foreach_add_
from headrace.shared_memory.barrier import MemberLost
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Segment
from headrace.training.central_storage.exchange import cut_segment, place_parameters
from headrace.training.central_storage.shared_state import SharedState, StateForm
from headrace.training.clipping import GradientClipper, LossScale
from headrace.training.gradients import SharedGradients
from headrace.training.optimizer import StatePiece
from headrace.training.reducing import Reduced, ReducingExchange
from headrace.training.reduction import shared_traffic
from headrace.training.synchronization import ElasticState
from headrace.training.update import Updater

Cut = Callable[[int], Sequence[Segment]]
"""From a number of workers to the segments of each."""
NewPiecesUpdater = Callable[[Sequence[tuple[Segment, Tensor]]], Updater]


@dataclass(frozen=True)
class _Share:
    """What one worker has of the storage while the members stay the same.

    Attributes:
        summed: the gradients of this worker's segments, where their sum appears; `others` are the other workers'.
        indices: which of the trainable parameters each segment is of.
    """

    members: tuple[int, ...]
    state: SharedState
    updater: Updater
    summed: list[Tensor]
    others: list[list[Tensor]]
    indices: list[int]


class ElasticStorageExchange(ReducingExchange):
    """Sums and updates this worker's segments of the one copy, which `cut` gives it for the number of members.

    Args:
        form: what the job's optimizer keeps.
        new_updater: returns what moves some segments, whose places are given.
        scale: of the loss; None for none.

    Attributes:
        sink: takes this worker's gradients, to where they lie now.
    """

    def __init__(
        self,
        cut: Cut,
        model: ModelSpec,
        group: ProcessGroup,
        module: nn.Module,
        form: StateForm,
        new_updater: NewPiecesUpdater,
        clipper: GradientClipper,
        scale: LossScale | None,
    ) -> None:
        self.keeps_writes = False
        self._cut = cut
        self._model = model
        self._group = group
        self._module = module
        self._form = form
        self._new_updater = new_updater
        self._scale = scale
        self._scale_before: dict[str, float] = {}
        self._undone: Mapping[str, Any] | None = None
        share = self._share = self._new_share(None)
        parameters, used = share.updater.parameters, self._shared.used
        super().__init__(share.updater, clipper, used, parameters, share.summed, 0, share.indices)
        self.sink = self._shared.sink

    def regroup(self) -> None:
        """Goes on with the group's present members; every member calls it."""
        share = self._new_share(self._share)
        self._share, self._undone = share, None
        self.updater, self._parameters, self._indices = share.updater, share.updater.parameters, share.indices
        self._attach(self._shared.used, share.summed)

    def reduce(self) -> Reduced:
        share = self._share
        if self._scale:
            # What is decided next changes it.
            self._scale_before = self._scale.settings()
        if share.summed:
            for gradients in share.others:
                foreach_add_(share.summed, gradients)
        self._group.moved_bytes += shared_traffic(self._shared.layout.nbytes, self._group.world)
        return share.summed, share.summed

    def update(self, round_: int) -> None:
        updater, before = self.updater, self.updater.settings()
        try:
            self._change(lambda: updater.apply(range(len(updater.owned)), round_))
        except MemberLost:
            # An optimizer may count its steps in attributes or groups.
            self._undone = before
            if self._scale:
                self._scale.load(self._scale_before)
            raise
        # The update counts: a round that comes again has not advanced the schedule.
        updater.skip(round_)

    def publish(self) -> None:
        """Every change has ended with a barrier."""

    def swap_weights(self, averaged: bool) -> None:
        self._follow()
        # No worker may still read what is changed.
        self._group.barrier()
        if averaged != self.updater.swapped:
            self._change(lambda: self.updater.swap_weights(averaged))

    def state(self) -> tuple[StatePiece, ...]:
        self._follow()
        return super().state()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self._follow()
        every = tuple(pieces)
        self._group.barrier()
        self._change(lambda: self.updater.load(every, settings))

    def memory(self) -> tuple[int, int]:
        share = self._share
        if self._group.rank:
            return 0, 0
        parameters = share.state.layout.nbytes
        return 2 * parameters, share.state.nbytes - 2 * parameters

    def _change(self, act: Callable[[], object]) -> None:
        """Changes this worker's segments: all workers change theirs, or on each a MemberLost is raised."""
        state = self._share.state
        state.begin()
        act()
        state.place(self.updater)
        self._group.barrier()
        self._group.commit()
        state.commit(self.updater.swapped)

    def _follow(self) -> None:
        """Regroups if workers were lost since: what all do together is done again by those that are left."""
        if self._share.members != tuple(self._group.members):
            self.regroup()

    def _new_share(self, old: _Share | None) -> _Share:
        """Makes this worker's share among the present members; the first of them takes over the state."""
        group, rank = self._group, self._group.rank
        every = self._cut(group.world)
        state = SharedState(self._model, self._form, every, group)
        if old is None:
            self._shared = SharedGradients(self._model.trainable, group)
        else:
            self._shared.regroup()
        own = [segment for segment in every if segment.owner == rank]
        if rank == 0 and old:
            state.take(old.state)
        elif rank == 0:
            views = state.layout.views(state.parameters)
            for view, parameter in zip(views, self._module.parameters(), strict=True):
                view.copy_(parameter.data)
        group.barrier()
        specs = {parameter.name: parameter for parameter in self._model.parameters}
        layout, regions = self._shared.layout, self._shared.regions

        def of(region: Tensor) -> list[Tensor]:
            return [cut_segment(layout, region, segment, specs) for segment in own]

        places = [cut_segment(state.layout, state.parameters, segment, specs) for segment in own]
        updater = self._updater_over(list(zip(own, places, strict=True)), state, old)
        place_parameters(self._module, state.layout, state.parameters)
        others = [of(region) for peer, region in enumerate(regions) if peer != rank]
        indices = [layout.names.index(segment.parameter) for segment in own]
        members, summed = tuple(group.members), of(regions[rank])
        return _Share(members, state, updater, summed, others, indices)

    def _updater_over(self, own: Sequence[tuple[Segment, Tensor]], state: SharedState, old: _Share | None) -> Updater:
        updater = self._new_updater(own)
        if old:
            state.swapped = old.state.swapped
            updater.load(state.pieces(), self._undone or old.updater.settings())
            updater.swapped = state.swapped
            state.place(updater)
        return updater


class StorageState(ElasticState):
    """All workers see all of the state; an update counts for all of them or for none."""

    def __init__(self, exchange: ElasticStorageExchange) -> None:
        self._exchange = exchange

    def regroup(self) -> None:
        self._exchange.regroup()

    def give(self) -> tuple[StatePiece, ...]:
        return ()

    def take(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any]) -> None:
        self._exchange.updater.load_settings(settings)
