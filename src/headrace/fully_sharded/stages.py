"""Stages of pipelines whose parameters are divided among the ranks that hold the same ones in other replicas.

    between rounds    rank 0   │ part 0 of each parameter, and what the optimizer keeps of it
                      rank 2   │ part 1
    in a round        gather ─► parameters whole ─► all passes of all micro-batches ─► scatter gradients ─► release

torch's hooks gather before a module runs and reduce after its backward. A stage runs a traced graph, and makes some
gradients late, so here all parameters of a rank are gathered for the whole of a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.collectives.base import Collective, ProcessGroup
from headrace.errors import UsageError
from headrace.fully_sharded.link import CollectiveLink, SharedLink, UnitLink
from headrace.fully_sharded.units import written
from headrace.modules import is_dense
from headrace.policies.segments import part_length
from headrace.spec.job import Share
from headrace.training.buckets import buckets, sum_over
from headrace.training.clipping import GradientClipper
from headrace.training.compute import Compute, Computed
from headrace.training.gradients import UsedParameters
from headrace.training.reducing import Reduced, ReducingExchange
from headrace.training.update import Updater

_UNIT_BYTES = 4 << 20
"""Of parameters that are gathered as one: enough that a barrier hardly counts, and little beside a stage."""


class _Unit:
    """Parameters of one type that are gathered as one.

    Attributes:
        own: this rank's part of all of them, side by side.
        total: the sum of its part of all ranks' gradients.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup) -> None:
        self.parameters = parameters
        self._places: dict[str, tuple[int, int]] = {}
        stop = 0
        for name, parameter in parameters.items():
            length = part_length(parameter.shape, group.world)
            self._places[name] = stop, length
            stop += length
        first = next(iter(parameters.values()))
        self.trained = first.requires_grad
        self.own = torch.zeros(stop, dtype=first.dtype, device=first.device)
        self.total = torch.zeros_like(self.own) if self.trained else self.own[:0]
        self.pieces: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            chunks, (start, length) = self._chunks(name, parameter.detach()), self._places[name]
            # Of fewer elements than ranks the last ones have none.
            if group.rank < len(chunks):
                own = chunks[group.rank]
                self.pieces[name] = self.own[start : start + len(own)].copy_(own)
                self.sums[name] = self.total[start : start + len(own)]

    def join(self, parts: Sequence[Tensor]) -> None:
        """Makes the parameters whole, of all ranks' parts."""
        for name, parameter in self.parameters.items():
            whole, start = parameter.new_empty(parameter.shape), self._places[name][0]
            for chunk, part in zip(self._chunks(name, whole), parts, strict=False):
                chunk.copy_(part[start : start + len(chunk)])
            parameter.data = whole

    def divide(self, gradients: Mapping[str, Tensor | None], rows: Tensor) -> None:
        """Puts each rank's part of the gradients into a row; where there is no gradient, zeros."""
        for name, (start, length) in self._places.items():
            gradient = gradients[name]
            if gradient is None:
                rows[:, start : start + length].zero_()
                continue
            for chunk, row in zip(self._chunks(name, gradient), rows, strict=False):
                row[start : start + len(chunk)].copy_(chunk)

    def _chunks(self, name: str, whole: Tensor) -> Sequence[Tensor]:
        chunks: Sequence[Tensor] = whole.reshape(-1).split(self._places[name][1])
        return chunks


class DividedParameters:
    """Parameters that all ranks of a group hold, and of which each has a part: whole within `gathered` alone.

    Otherwise a parameter keeps its name, shape and type, and reads as NaN. `carrier` moves what the ranks exchange;
    None for the memory that they share.

    Attributes:
        trained: the names of those that are trained.
        pieces: this rank's part of each of them, flat, by name; of fewer elements than ranks some have none.
        sums: the sums of all ranks' gradients of the same parts, after `sum_gradients`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup, carrier: Collective | None = None
    ) -> None:
        self._group = group
        dense = {name: each for name, each in parameters.items() if is_dense(each)}
        kinds = dict.fromkeys((each.dtype, each.requires_grad) for each in dense.values())
        self._units: list[_Unit] = []
        for kind in kinds:
            names = [name for name, each in dense.items() if (each.dtype, each.requires_grad) == kind]
            for start, stop in buckets([dense[name].nbytes for name in names], _UNIT_BYTES, _UNIT_BYTES):
                self._units.append(_Unit({name: dense[name] for name in names[start:stop]}, group))
        self.whole_bytes = sum(each.nbytes for each in dense.values())
        self.part_bytes = sum(unit.own.nbytes for unit in self._units)
        self.trained = tuple(name for name, each in parameters.items() if each.requires_grad)
        trained = [unit for unit in self._units if unit.trained]
        self.pieces = {name: nn.Parameter(piece) for unit in trained for name, piece in unit.pieces.items()}
        self.sums = {name: total for unit in trained for name, total in unit.sums.items()}
        titles = tuple(next(iter(unit.parameters)) for unit in self._units)
        largest, summed = (
            group.world * max((unit.own.nbytes for unit in units), default=0) for units in (self._units, trained)
        )
        device = next((each.device for each in dense.values()), torch.device("cpu"))
        self._link: UnitLink = (
            SharedLink(group, titles, largest, summed)
            if carrier is None and group.one_memory
            else CollectiveLink(group, titles, carrier or group, device)
        )
        self._release()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Makes the parameters whole for a while; all ranks enter it together.

        Raises:
            UsageError: a parameter was changed meanwhile, by name.
        """
        for index, unit in enumerate(self._units):
            unit.join([part.view(unit.own.dtype) for part in self._link.parts(index, unit.own)])
        every = {name: each for unit in self._units for name, each in unit.parameters.items()}
        versions = [internals.version(each) for each in every.values()]
        try:
            yield
        finally:
            changed = [
                name for (name, each), v in zip(every.items(), versions, strict=True) if internals.version(each) != v
            ]
            self._release()
        if changed:
            raise written(changed[0])

    def sum_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Sums all ranks' gradients of `trained`; None counts as zeros. All ranks call it."""
        given = dict(zip(self.trained, gradients, strict=True))
        for index, unit in enumerate(self._units):
            if unit.trained:
                world, length = self._group.world, len(unit.own)
                flat = self._link.region(index, world * length, unit.own.dtype)
                unit.divide(given, flat.view(world, length))
                self._link.scatter(index, unit.total, flat)
        self._link.settle()

    def _release(self) -> None:
        for unit in self._units:
            for parameter in unit.parameters.values():
                numbers = parameter.is_floating_point() or parameter.is_complex()
                parameter.data = parameter.new_full((), math.nan if numbers else 0).expand(parameter.shape)


class PartialSums:
    """A `GradientSink` that leaves each rank the sum of its parts."""

    def __init__(self, divided: DividedParameters, used: UsedParameters) -> None:
        self._divided = divided
        self._used = used

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes one gradient a trained parameter."""
        self._used.publish(gradients)
        self._divided.sum_gradients(gradients)

    def store_nothing(self) -> None:
        """Takes part without gradients."""
        self._used.publish_nothing()
        self._divided.sum_gradients([None] * len(self._divided.trained))


class DividedCompute(Compute):
    """Computes with parameters that are whole only meanwhile. The ranks that hold them do everything together."""

    def __init__(self, compute: Compute, divided: DividedParameters) -> None:
        self.module, self.device = compute.module, compute.device
        self.counts, self.mates = compute.counts, compute.mates
        self._compute = compute
        self._divided = divided
        compute.module.register_forward_pre_hook(_refuse)

    def run(self, share: Share) -> Computed:
        with self._divided.gathered():
            computed = self._compute.run(share)
        self.moved_bytes, self.in_flight = self._compute.moved_bytes, self._compute.in_flight
        self.passes = self._compute.passes
        return computed

    def predict(self, batch: Any) -> Any:
        with self._divided.gathered():
            return self._compute.predict(batch)

    def attend(self) -> None:
        with self._divided.gathered():
            pass

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        with self._divided.gathered():
            yield from self._compute.whole_tensors(leads)

    def has_state_of(self, module: str) -> bool:
        return self._compute.has_state_of(module)


class DividedExchange(ReducingExchange):
    """Updates this rank's parts, of whose gradients compute has left the sums.

    `measured` are the names of the parameters that no other rank measures; `mates` hold the same parts, where each of
    several groups of ranks divides its parameters.
    """

    def __init__(
        self,
        updater: Updater,
        clipper: GradientClipper,
        used: UsedParameters,
        divided: DividedParameters,
        measured: frozenset[str],
        mates: Collective | None,
    ) -> None:
        sums = list(divided.sums.values())
        indices = [divided.trained.index(name) for name in divided.pieces]
        super().__init__(updater, clipper, used, list(divided.pieces.values()), sums, divided.part_bytes, indices)
        self._reduced = [total for name, total in divided.sums.items() if name in measured], sums
        self._mates = mates

    def reduce(self) -> Reduced:
        if self._mates:
            sum_over(self._mates, self._reduced[1])
        return self._reduced


def _refuse(module: nn.Module, inputs: Any) -> None:
    raise UsageError(
        f"the parameters of {type(module).__name__} are divided among ranks, and whole within a step alone; use "
        "worker.step(batch), which computes whole steps, and worker.evaluate()"
    )
