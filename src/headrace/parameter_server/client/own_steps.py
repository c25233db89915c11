"""A worker's own steps with the job's optimizer, which outlast a fetch, and how far they have moved its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from headrace.internals import foreach_add, foreach_copy_, foreach_sub, foreach_sub_
from headrace.training.exchange import UpdatingExchange


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
        return [[next(every).view(shape) for shape in shapes] for shapes in self._shapes]

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


class LocalOptimizer:
    """The job's optimizer on a worker's own parameters, in a run where other workers do rounds that this one does not.

    `exchange` is a worker's that trains alone; `first` is the run's first round.
    """

    def __init__(self, exchange: UpdatingExchange, pieces: int, first: int) -> None:
        self.exchange = exchange
        self._pieces = range(pieces)
        self._advanced = first

    def step(self, round_: int) -> None:
        """Applies the gradients of a round."""
        self._advance(round_)
        self.exchange.updater.apply(self._pieces, round_)

    def settings(self, done: int) -> dict[str, Any]:
        """Returns the settings after so many rounds of all workers."""
        self._advance(done)
        return self.exchange.settings()

    def _advance(self, round_: int) -> None:
        while self._advanced < round_:
            self.exchange.updater.skip(self._advanced)
            self._advanced += 1
