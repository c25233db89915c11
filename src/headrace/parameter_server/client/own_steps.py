"""What a worker runs whose own steps are those of the job's optimizer: it pushes how far they have moved it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.internals import foreach_add, foreach_copy_, foreach_sub, foreach_sub_
from headrace.parameter_server.client.data_leases import ServerDataLeases
from headrace.parameter_server.client.downpour import LeasedExchange, Push, ServerLinks
from headrace.parameter_server.client.exchange import ReplicaGroup
from headrace.parameter_server.wire import ShardLayout
from headrace.spec.model import ModelSpec
from headrace.training.clipping import HEALTHY, StepDecision
from headrace.training.exchange import UpdatingExchange
from headrace.training.optimizer import StatePiece
from headrace.training.update import AVERAGE


class OwnSteps:
    """How far a worker's own steps have moved its parameters from those that the servers have, or will have.

    `places` are the parameters by server and shard, flat; `shapes` are those of what is pushed. Fetched ones take their
    place, and the steps that they lack are added: those since the last push, and those pushed after the fetch began.
    """

    def __init__(self, places: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> None:
        self._shapes = shapes
        self._places = [*chain(*places)]
        self._origins = [place.clone() for place in self._places]
        self._fetching = False
        self._late: list[Tensor] | None = None

    def push(self) -> list[list[Tensor | None]]:
        """Returns minus the movement since the last push by server and shard, to be applied like gradients."""
        moved = self._back()
        if self._fetching:
            self._late = moved if self._late is None else list(foreach_add(self._late, moved))
        self._copy(self._origins, self._places)
        every = iter(moved)
        return [[next(every).view(shape) for shape in own] for own in self._shapes]

    def begin_fetch(self) -> None:
        """From now on, what is pushed is not part of what is fetched next."""
        self._fetching, self._late = True, None

    def pull(self, pull: Callable[[], None]) -> None:
        """Calls `pull`, which changes the parameters, and adds the steps that were not pushed yet."""
        left = self._back()
        pull()
        self._copy(self._origins, self._places)
        if self._places:
            foreach_sub_(self._places, left)

    def take_over(self, fetched: list[Tensor]) -> None:
        """Puts fetched parameters, and the own steps that they lack, in the parameters' place."""
        if not self._places:
            return
        left = self._back()
        self._copy(self._origins, fetched)
        if self._late is not None:
            foreach_sub_(self._origins, self._late)
        self._copy(self._places, self._origins)
        foreach_sub_(self._places, left)
        self._fetching, self._late = False, None

    def restart(self) -> None:
        """Begins with the parameters as they are."""
        self._copy(self._origins, self._places)
        self._fetching, self._late = False, None

    def _back(self) -> list[Tensor]:
        return list(foreach_sub(self._origins, self._places)) if self._places else []

    def _copy(self, to: list[Tensor], values: list[Tensor]) -> None:
        if to:
            foreach_copy_(to, values)


class OwnStepsExchange(LeasedExchange):
    """Steps with the job's optimizer, and pushes how far a lease's steps have moved the parameters when it ends.

    A checkpoint holds the optimizer state of the leader, and all go on with it; that of a lost worker is lost with it,
    and its replacement begins with none. `first` is the run's first round.
    """

    keeps_writes = True

    def __init__(
        self,
        leases: ServerDataLeases,
        layouts: Sequence[ShardLayout],
        model: ModelSpec,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
        links: ServerLinks,
        local: UpdatingExchange,
        first: int,
    ) -> None:
        super().__init__(leases, layouts, model, group, replica_group, links)
        assert links.kept is not None, "links that keep this worker's steps"
        self._inner, self._own = local, links.kept
        self._pieces = range(len(model.trainable))
        self._advanced = first
        self._shares: list[float] = []

    def begin(self, round_: int) -> None:
        super().begin(round_)
        self._inner.begin(round_)

    def synchronize(self, finite: bool = True) -> StepDecision:
        leases = self.leases
        if leases.lease < 0:
            # It had no data before the sync point.
            return HEALTHY
        decision = self._inner.synchronize(finite)
        if not decision.apply:
            self.nonfinite = True
        elif leases.weight:
            self._advance(self._round)
            self._inner.updater.apply(self._pieces, self._round)
            self._shares.append(leases.share)
        self.end_step()
        return replace(decision, bad_losses=(self._group.rank,)) if decision.bad_losses else decision

    def take(self) -> Push:
        shares, self._shares = self._shares, []
        return self._own.push(), sum(shares) / len(shares) if shares else 0.0, len(shares)

    def swap_weights(self, averaged: bool) -> None:
        super().swap_weights(averaged)
        self._own.restart()

    def state(self) -> Iterable[StatePiece]:
        return chain(super().state(), self._inner.state() if self._group.rank == 0 else ())

    def settings(self) -> dict[str, Any]:
        # Other workers have done rounds that this one has not.
        self._advance(self.leases.synced_round)
        return self._inner.settings()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = list(pieces)
        super().load(piece for piece in every if piece.key == AVERAGE)
        self._inner.load([piece for piece in every if piece.key != AVERAGE], settings)

    def memory(self) -> tuple[int, int]:
        # The parameters at the last push, and what is on its way.
        return super().memory()[0] + 2 * self._inner.parameter_bytes, self._inner.memory()[1]

    def _advance(self, round_: int) -> None:
        while self._advanced < round_:
            self._inner.updater.skip(self._advanced)
            self._advanced += 1
