"""What becomes of the state of sets that take turns, where workers are lost, join and leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from headrace.training.elastic import ElasticState
from headrace.training.optimizer import StatePiece
from headrace.training.turns.exchange import SETS, pieces_of_sets


class TurnsState(ElasticState):
    """The states of all sets, by name: the members are the same for all, whose turn it may be.

    `holders` are the sets of the parameters, by the parameters' names.
    """

    def __init__(self, states: Mapping[str, ElasticState], holders: Mapping[str, str]) -> None:
        self._states = states
        self._holders = holders

    def regroup(self) -> None:
        for each in self._states.values():
            each.regroup()

    def keep(self) -> None:
        for each in self._states.values():
            each.keep()

    def bring_back(self) -> None:
        for each in self._states.values():
            each.bring_back()

    def give(self) -> tuple[StatePiece, ...]:
        return tuple(chain.from_iterable(each.give() for each in self._states.values()))

    def take(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any]) -> None:
        by_set = pieces_of_sets(pieces, self._holders)
        for name, each in self._states.items():
            each.take(by_set.get(name, ()), settings[SETS][name])
