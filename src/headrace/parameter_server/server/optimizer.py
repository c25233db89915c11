"""The optimizer of a server's shards, and the remedies for stale gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.machine.allocator import give_back
from headrace.parameter_server.server.updater import PushedStep, ShardOptimizerState, ShardUpdater
from headrace.parameter_server.sparse.tables import ServedTables
from headrace.parameter_server.wire import ShardLayout, like
from headrace.spec.model import OptimizerNeeds, ParameterSpec
from headrace.spec.options import Options
from headrace.spec.plan import Segment
from headrace.training.optimizer import StatePiece, build_over, prefer_fused, stand_in
from headrace.training.update import Updater

_EXACTLY = 1e-6
"""Tolerance of the sum of a round's shares."""


@dataclass(frozen=True)
class Remedies:
    """Remedies for stale gradients.

    Attributes:
        divide: divide a step's learning rate by its staleness (Zhang et al., "Staleness-aware async-SGD", 2016,
            section 3).
        compensation: the constant of DC-ASGD-c: adds `compensation * g * g * (w - w_then)` to a gradient g that was
            made with the parameters w_then (Zheng et al., "Asynchronous SGD with delay compensation", 2017, section
            4). It costs a copy of the parameters for each worker.
        asynchronous_workers: that many workers that do not wait for each other add a momentum of `1 - 1 / workers`,
            by which the optimizer's is lowered, not below 0 (Mitliagkas et al., "Asynchrony begets momentum", 2016,
            theorem 3); 0 leaves it unchanged.

    Examples:
        >>> strategy = hr.ParameterServer(workers=2, remedies=hr.Remedies(divide=True))
        >>> hr.fit(job, strategy).status
        'ok'
    """

    divide: bool = False
    compensation: float = 0.0
    asynchronous_workers: int = 0


@dataclass(frozen=True)
class RoundClock:
    """The job's options, rounds per epoch and first round: what schedules and averages go by."""

    options: Options = field(default_factory=Options)
    rounds_per_epoch: int = 1
    first: int = 0


class ShardOptimizer(ShardUpdater):
    """Updates the parameters of one server's shards, which are numbered from 0.

    `factory` makes the job's optimizer from named parameters, `parameters` are those of the whole model, in order. If
    `full`, every step is applied with the whole learning rate, as in papers, not with its share of it. `tables` are
    updated row by row, by themselves.
    """

    def __init__(
        self,
        layout: ShardLayout,
        factory: Callable[..., Any],
        parameters: Sequence[ParameterSpec],
        clock: RoundClock | None = None,
        full: bool = False,
        remedies: Remedies | None = None,
        tables: ServedTables | None = None,
        needs: OptimizerNeeds | None = None,
    ) -> None:
        super().__init__(layout)
        self.tables = tables
        self._needs = needs or OptimizerNeeds()
        self.at_once = self._needs.at_once
        self._full = full
        self._remedies = remedies or Remedies()
        self._factory = factory
        self._whole = parameters
        self._clock = clock or RoundClock()
        self._round = self._clock.first
        self._done = [float(self._round)] * len(layout)
        self._begun: set[int] = set()
        self._sent: dict[tuple[int, int], Tensor] = {}

    def bind(self, tensors: Sequence[Tensor]) -> None:
        owned = [
            (Segment(piece.parameter, piece.start, piece.start + piece.elements, 0), tensor)
            for piece, tensor in zip(self._layout.pieces, tensors, strict=True)
        ]
        host = torch.device("cpu")
        named = (
            (spec.name, stand_in(spec.shape, getattr(torch, spec.dtype), host, spec.trainable)) for spec in self._whole
        )
        optimizer, self._parameters = build_over(self._factory, named, owned, filled=self._needs.gradients)
        prefer_fused(optimizer)
        pairs = [(segment, parameter) for (segment, _), parameter in zip(owned, self._parameters, strict=True)]
        self._updater = Updater(optimizer, pairs, self._clock.options, self._clock.rounds_per_epoch)

    def apply(self, gradients: Sequence[tuple[int, Tensor]], shards: Sequence[int], step: PushedStep) -> None:
        if self._sent:
            gradients = [(shard, self._compensated(shard, gradient, step.worker)) for shard, gradient in gradients]
        factor, rounds = 1.0 if self._full else step.share, step.share * step.steps
        if self._remedies.divide and step.staleness > 1:
            factor /= step.staleness
        if not self._updater.descend(gradients, self._round, factor):
            for shard, gradient in gradients:
                self._parameters[shard].grad = gradient
            with self._lowered():
                # All of them, because averages continue without a gradient.
                self._updater.apply(shards, self._round, rounds, factor)
            for shard, _ in gradients:
                self._parameters[shard].grad = None
            if not self._begun.issuperset(shards):
                self._begun.update(shards)
                # An optimizer allocates its state in a shard's first step, between temporary tensors. Freed, these
                # leave holes in memory, one for each shard, that the next state does not fit into.
                give_back()
        for shard in shards:
            self._done[shard] += rounds
        self._advance(int(min(self._done) + _EXACTLY))

    def settle(self, done: int) -> None:
        self._done = [float(done)] * len(self._done)
        self._advance(done)
        if self.tables is not None:
            self.tables.settle(done)

    def sent(self, worker: int, shards: Sequence[int] | None) -> None:
        if shards is None:
            self._sent = {key: tensor for key, tensor in self._sent.items() if key[0] != worker}
        elif self._remedies.compensation:
            for shard in shards:
                self._sent[worker, shard] = self._parameters[shard].detach().clone()

    def _settings(self) -> dict[str, Any]:
        tables = {} if self.tables is None else {"tables": self.tables.settings()}
        return {**self._updater.settings(), **tables}

    def _load_settings(self, settings: dict[str, Any] | None) -> None:
        self._updater.load([], settings)
        if self.tables is not None and settings is not None and "tables" in settings:
            self.tables.load_settings(settings["tables"])

    def _pieces(self, shard: int) -> Iterable[StatePiece]:
        return self._updater.state(shard, copies=False)

    def _load_pieces(self, pieces: Sequence[StatePiece], shard: int) -> None:
        self._updater.load(pieces, index=shard)

    def all_state(self) -> tuple[ShardOptimizerState, dict[str, Tensor]]:
        tensors = {f"sent/{worker}/{shard}": tensor for (worker, shard), tensor in self._sent.items()}
        for shard in range(len(self._layout)):
            tensors |= {f"state/{shard}/{piece.name}": piece.value for piece in self._pieces(shard)}
        # For optimizers that draw random numbers.
        tensors["random"] = torch.get_rng_state()
        tables, rows = self.tables.state() if self.tables is not None else (None, {})
        settings = self.state().decode()
        state = ShardOptimizerState(self._round, tuple(self._done), settings, self._updater.swapped, tables)
        return state, tensors | rows

    def load_all(self, state: ShardOptimizerState, tensors: Mapping[str, Tensor]) -> None:
        if len(state.done) != len(self._layout):
            raise ValueError(f"the state is of {len(state.done)} shards, and {len(self._layout)} are here")
        self.load(state.settings.encode())
        self._sent.clear()
        pieces: dict[int, list[StatePiece]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "state":
                shard, _, piece = rest.partition("/")
                pieces.setdefault(int(shard), []).append(StatePiece.parse(piece, tensor))
            elif kind == "sent":
                worker, _, shard = rest.partition("/")
                self._sent[int(worker), int(shard)] = like(tensors, name, self._parameters[int(shard)]).clone()
        for index, values in pieces.items():
            self._load_pieces(values, index)
        torch.set_rng_state(like(tensors, "random", torch.get_rng_state()).clone())
        self._round, self._done = state.round, list(state.done)
        if self.tables is not None:
            if state.tables is None:
                raise ValueError("the state has no tables")
            self.tables.load(state.tables, tensors)
        # The tensors were saved exchanged.
        self._updater.swapped = state.shows_average

    def swap_weights(self, averaged: bool) -> None:
        self._updater.swap_weights(averaged)

    def memory(self) -> tuple[int, int]:
        values, state = self.tables.memory() if self.tables is not None else (0, 0)
        return sum(self._layout.slots.lengths) + values, self._updater.state_bytes() + state

    def _compensated(self, shard: int, gradient: Tensor, worker: int) -> Tensor:
        then = self._sent.get((worker, shard))
        if then is None:
            return gradient
        drift = self._parameters[shard].detach() - then
        return gradient + self._remedies.compensation * gradient * gradient * drift

    @contextmanager
    def _lowered(self) -> Iterator[None]:
        """Lowers the optimizer's momentum by that of asynchrony."""
        workers = self._remedies.asynchronous_workers
        if workers < 2:
            yield
            return
        implicit = 1 - 1 / workers
        groups = self._updater.optimizer.param_groups
        options = [{str(key): group[key] for key in ("momentum", "betas") if key in group} for group in groups]
        for group in groups:
            if "momentum" in group:
                group["momentum"] = max(0.0, group["momentum"] - implicit)
            if "betas" in group:
                first, *others = group["betas"]
                group["betas"] = (max(0.0, first - implicit), *others)
        try:
            yield
        finally:
            for group, before in zip(groups, options, strict=True):
                group.update(before)

    def _advance(self, done: int) -> None:
        while self._round < done:
            self._updater.skip(self._round)
            self._round += 1
