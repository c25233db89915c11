"""A model whose experts are divided among ranks, and each rank's part of it sharded over others that have the same.

    shards x experts     rank 0   half of experts 0 1, and of the rest    rank 1   half of experts 2 3, and of the rest
                         rank 2   the other half of these                 rank 3   the other half of these

Units are gathered, and their gradients summed, by the ranks that hold the same experts (0 and 2); what all hold is then
summed over those that have the same part of it, too (0 and 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.expert_parallel.division import ExpertDivision
from headrace.modules import parameters_and_buffers
from headrace.training.buckets import sum_over
from headrace.trees import as_bytes


class ShardedUnits(Protocol):
    """A module that ranks have sharded: `fully_sharded.ShardedModule`, whose members these are."""

    module: nn.Module
    device: torch.device
    half: torch.dtype | None
    pieces: dict[str, nn.Parameter]
    whole: frozenset[str]
    seen: set[str]

    def begin(self) -> None: ...
    def hooked(self) -> list[str]: ...
    def silent(self) -> AbstractContextManager[None]: ...
    def divide(self, weight: float | Tensor) -> None: ...
    def sum_gradients(self, missing: Callable[[str], bool], mates: Collective | None) -> list[tuple[str, Tensor]]: ...
    def reshard(self) -> None: ...
    def parts(self) -> Iterator[tuple[str, int, Tensor]]: ...
    def held_bytes(self) -> int: ...
    def describe(self) -> str: ...


class ShardedExperts:
    """What a rank has of such a model.

    Args:
        within: the ranks that shard what this rank has.
        replica: those that hold a replica together.
        alike: those that have the same part of what all hold, in all replicas.

    Attributes:
        pieces: this rank's part of each trained parameter, flat, by name; of an expert elsewhere it is empty.
        whole: names of those that every rank has whole.
    """

    def __init__(
        self,
        division: ExpertDivision,
        shards: ShardedUnits,
        within: ProcessGroup,
        replica: ProcessGroup,
        alike: Collective,
    ) -> None:
        self.module, self.device, self.half, self.seen = shards.module, shards.device, shards.half, shards.seen
        self._division, self._shards = division, shards
        self._within, self._replica, self._alike = within, replica, alike
        self.whole = shards.whole - division.experts.keys()
        own = dict(self.module.named_parameters())
        # In the same order on all ranks, which tell each other by number what has a gradient.
        self.pieces = {
            name: shards.pieces[name] if name in shards.pieces else nn.Parameter(torch.empty(0, dtype=each.dtype))
            for name, each in own.items()
            if each.requires_grad
        }

    def begin(self) -> None:
        """Forgets the gradients of the last step."""
        self._shards.begin()
        self._forget()

    def _forget(self) -> None:
        for piece in self.pieces.values():
            piece.grad = None

    def hooked(self) -> list[str]:
        """Returns the names of the parameters that user code has hung hooks on."""
        return self._shards.hooked()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Takes part in what the others compute, without tokens of its own."""
        with self._shards.silent(), self._division.link.silenced(), self._division.every.silenced():
            yield

    def divide(self, weight: float | Tensor) -> None:
        """Divides the gradients by the weight of all examples."""
        self._shards.divide(weight)

    def sum_gradients(self, missing: Callable[[str], bool], mates: Collective | None) -> list[tuple[str, Tensor]]:
        """Puts the summed gradients into the pieces, except those of parameters of which no rank has one.

        `mates` hold the same part of the same experts in other replicas.
        """
        self._forget()
        found = self._shards.sum_gradients(missing, None)
        experts = self._division.experts
        sum_over(self._alike, [gradient.view(-1) for name, gradient in found if name not in experts])
        if mates:
            sum_over(mates, [gradient.view(-1) for name, gradient in found if name in experts])
        for name, gradient in found:
            self.pieces[name].grad = gradient
        return found

    def reshard(self) -> None:
        """Releases what a forward without a backward has left gathered."""
        self._shards.reshard()

    def parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yields this rank's part of every parameter, flat, after its name and the element at which the part begins."""
        for name, first, part in self._shards.parts():
            yield name, self._division.first(name) + first, part

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields what of the model this rank saves, whole, by checkpoint name, where one of the replica's ranks leads.

        Each parameter is another rank's in turn, so that none holds all; the rest is the leader's.
        """
        self._shards.reshard()
        own = {name: (first, part) for name, first, part in self.parts()}
        (saves,) = self._replica.sum([float(leads)])
        divided = 0
        for name, tensor in parameters_and_buffers(self.module):
            kind, _, parameter = name.partition("/")
            if kind != "parameter" or parameter in self.whole:
                if leads:
                    yield name, tensor
                continue
            if not saves:
                continue
            whole = torch.zeros(self._division.shapes[parameter], dtype=tensor.dtype)
            first, part = own.get(parameter, (0, whole.new_empty(0)))
            expert = parameter in self._division.experts
            # Of what several ranks have whole, the first gives it.
            if parameter not in self._shards.whole or not self._within.rank:
                whole.view(-1)[first : first + part.numel()] = part.cpu()
            # As bytes: a sum of numbers would lose the sign of a zero.
            (self._replica if expert else self._within).all_reduce(as_bytes(whole))
            if divided % self._replica.world == self._replica.rank:
                yield name, whole
            divided += 1
            del whole

    def held_bytes(self) -> int:
        """Returns the bytes of the parameters that this rank holds."""
        return self._shards.held_bytes()

    def describe(self) -> str:
        """Says how the model is divided."""
        return f"{self._division.describe()}; what each has is {self._shards.describe()}"
