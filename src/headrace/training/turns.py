"""Sets of parameters that are trained in turns, each by a compute and an exchange with an optimizer of its own.

    round        0               1               2               3
    set          critic          critic          generator       critic
    its own      0               1               0               2

Each exchange has the gradients of its own set alone, and counts its own rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from headrace.metrics import Mean
from headrace.spec.job import Share
from headrace.spec.parameter_sets import TurnOrder
from headrace.training.clipping import StepDecision
from headrace.training.compute import Compute, Computed
from headrace.training.exchange import Exchange, UpdatingExchange
from headrace.training.optimizer import StatePiece
from headrace.training.synchronization import ElasticState

SETS = "sets"
"""The key, in the settings, of those of each set."""


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


class _SetExchanges(Exchange):
    """What is done with the exchanges of all sets, whose turn it may be."""

    def __init__(self, exchanges: Mapping[str, UpdatingExchange], holders: Mapping[str, str]) -> None:
        self._exchanges = exchanges
        self.keeps_writes = all(each.keeps_writes for each in exchanges.values())
        self._holders = holders

    def swap_weights(self, averaged: bool) -> None:
        for each in self._exchanges.values():
            each.swap_weights(averaged)

    def scale_rates(self, factor: float) -> None:
        for each in self._exchanges.values():
            each.scale_rates(factor)

    def learning_rates(self) -> Mapping[str, Any]:
        each = self._exchanges.items()
        return {f"{name}/{curve}": x for name, one in each for curve, x in one.learning_rates().items()}

    def state(self) -> Iterable[StatePiece]:
        return chain.from_iterable(each.state() for each in self._exchanges.values())

    def own(self) -> tuple[StatePiece, ...]:
        return tuple(chain.from_iterable(each.own() for each in self._exchanges.values()))

    def settings(self) -> dict[str, Any]:
        return {SETS: {name: each.settings() for name, each in self._exchanges.items()}}

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        by_set = _pieces_of_sets(pieces, self._holders)
        for name, each in self._exchanges.items():
            each.load(by_set.get(name, ()), None if settings is None else settings[SETS][name])

    def memory(self) -> tuple[int, int]:
        held = [each.memory() for each in self._exchanges.values()]
        return sum(parameters for parameters, _ in held), sum(state for _, state in held)


class TurnsExchange(_SetExchanges):
    """Synchronizes and updates in each round one set of parameters.

    Args:
        exchanges: those of the sets, by name.
        holders: the set of each parameter, by the parameter's name.
    """

    def __init__(self, exchanges: Mapping[str, UpdatingExchange], holders: Mapping[str, str], order: TurnOrder) -> None:
        super().__init__(exchanges, holders)
        self._order = order
        self._turn = next(iter(exchanges.values()))
        self.defers = all(each.defers for each in exchanges.values())

    def begin(self, round_: int) -> None:
        self._turn = self._exchanges[self._order.at(round_)]
        self._turn.begin(self._order.own_round(round_))

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        return self._turn.synchronize(finite)

    def update(self, round_: int) -> None:
        self._turn.update(self._order.own_round(round_))

    def skip(self, round_: int) -> None:
        self._turn.skip(self._order.own_round(round_))


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
        by_set = _pieces_of_sets(pieces, self._holders)
        for name, each in self._states.items():
            each.take(by_set.get(name, ()), settings[SETS][name])


def _pieces_of_sets(pieces: Iterable[StatePiece], holders: Mapping[str, str]) -> dict[str, list[StatePiece]]:
    """Returns the pieces of each set; `holders` are the sets of the parameters, by the parameters' names."""
    found: dict[str, list[StatePiece]] = {}
    for piece in pieces:
        found.setdefault(holders[piece.parameter], []).append(piece)
    return found
