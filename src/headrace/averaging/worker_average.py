"""The workers' copies of the same tensors, and their way to the mean: in shared memory, or by a collective.

In shared memory every worker's copy lies where all see it. Rank r averages the r-th part of all copies, and writes the
result into each of them:

    worker 0   │ steps on C0 ─┐            ┌─► part 0 of C0, C1 ◄─ mean of part 0 ─┐
               │              ├─ barrier ──┤                                       ├─ barrier ──► steps on C0
    worker 1   │ steps on C1 ─┘            └─► part 1 of C0, C1 ◄─ mean of part 1 ─┘

Workers that meet rarely step on memory of their own, which may lie in large pages, and bring it there and back.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.averaging.outer_steps import OuterStep
from headrace.collectives.base import Collective, ProcessGroup
from headrace.training.batch_norm import averaged_buffers
from headrace.training.gradients import FlatLayout
from headrace.training.optimizer_state import MeanState, describe_tensor, mean_state

_CHUNK = 65_536
"""Elements that are worked on at a time, so that they stay in a core's cache."""


def averaged_traffic(nbytes: int, workers: int) -> int:
    """Returns the bytes that a worker reads of others and writes for them, where each averages 1/N of all copies.

    It reads its part of the others' copies, and writes the mean into it: 2 (N - 1)/N.
    """
    return 2 * nbytes * (workers - 1) // workers


@dataclass(frozen=True)
class AverageSums:
    """What a rank has measured of what it has averaged; the sums over ranks are those of the whole.

    Attributes:
        squares: squared distance from the mean, by rank.
        norm: squared norm of the mean.
    """

    squares: list[float]
    norm: float


class WorkerAverage(ABC):
    """Averages the workers' copies.

    Attributes:
        layout: places of the tensors.
        own: this worker's copy, `(nbytes,)` uint8.
        shown: where the others see it, if that is not where it is.
        kept: what the outer step keeps beside it, in the same form.
        lost: what this worker still owes the others, because it was lost on the way, in the same form.
        nbytes: that this rank adds to the host.
    """

    layout: FlatLayout
    own: Tensor
    shown: Tensor | None = None
    kept: tuple[Tensor, ...]
    lost: tuple[Tensor, ...] = ()
    nbytes: int

    @property
    def elements(self) -> list[Tensor]:
        """This worker's copy, flat, one tensor a type."""
        return [span.of(self.own) for span in self.layout.spans]

    def begin(self) -> None:
        """Lets what is kept begin with the copies, which are all alike."""
        for region in self.kept[:1]:
            region.copy_(self.own)

    def publish(self) -> None:
        """Brings this worker's copy where the others see it; before all ranks meet to combine them."""
        if self.shown is not None:
            self.shown.copy_(self.own)

    def take(self) -> None:
        """Brings it back; when they have met again."""
        if self.shown is not None:
            self.own.copy_(self.shown)

    @abstractmethod
    def combine(self, weights: Sequence[float], look: bool = False) -> AverageSums:
        """Brings the copies together; all ranks have written theirs, and meet again before they read them.

        Args:
            weights: of the copies in their mean, by rank, with a sum of 1; a copy that is to be left out has a negative
                one, and becomes the mean first.
            look: let the trained model stand in every copy's place, and what is kept as it is.
        """


class SharedMemoryAverage(WorkerAverage):
    """In shared memory.

    Args:
        layout: places of the tensors; of floating-point types alone.
        group: the workers of this host.
        outer: what becomes of the copies.
        apart: let this worker's copy lie in memory of its own between meetings.
    """

    def __init__(self, layout: FlatLayout, group: ProcessGroup, outer: OuterStep, apart: bool) -> None:
        self.layout = layout
        regions = group.share(layout.nbytes)
        self.own = regions[group.rank]
        if apart:
            self.own, self.shown = torch.zeros_like(self.own), self.own
        # One for all, of which each rank moves its part.
        self.kept = tuple(group.share(0 if group.rank else layout.nbytes)[0] for _ in range(outer.copies_kept))
        self.nbytes = layout.nbytes * (1 + apart + (0 if group.rank else outer.copies_kept))
        parts = [span.part(group.rank, group.world) for span in layout.spans]
        self._copies = [[part.of(region) for region in regions] for part in parts]
        self._kept = [[part.of(region) for region in self.kept] for part in parts]
        self._group = group
        self._outer = outer
        self._traffic = averaged_traffic(layout.nbytes, group.world)

    def combine(self, weights: Sequence[float], look: bool = False) -> AverageSums:
        total = AverageSums([0.0] * len(weights), 0.0)
        for copies, kept in zip(self._copies, self._kept, strict=True):
            for start in range(0, len(copies[0]), _CHUNK):
                stop = start + _CHUNK
                chunks = [copy[start:stop] for copy in copies]
                move = functools.partial(moved, self._outer, [each[start:stop] for each in kept], look)
                total = _plus(total, _combine(chunks, weights, move))
        self._group.moved_bytes += self._traffic
        return total


class CollectiveAverage(WorkerAverage):
    """By a collective that carries tensors; each rank holds all that is kept.

    Args:
        layout: places of the tensors; of floating-point types alone.
        wire: of all workers.
        device: where the tensors live.
        outer: what becomes of the copies.
    """

    def __init__(self, layout: FlatLayout, wire: Collective, device: torch.device, outer: OuterStep) -> None:
        self.layout = layout
        self.own, *kept = (
            torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(1 + outer.copies_kept)
        )
        self.kept = tuple(kept)
        self.nbytes = layout.nbytes * (1 + outer.copies_kept)
        self._wire = wire
        self._outer = outer

    def combine(self, weights: Sequence[float], look: bool = False) -> AverageSums:
        total = AverageSums([0.0] * len(weights), 0.0)
        rank = self._wire.rank
        workers = sum(weight >= 0 for weight in weights)
        for span in self.layout.spans:
            copy, kept = span.of(self.own), [span.of(region) for region in self.kept]
            mean = torch.zeros_like(copy) if weights[rank] < 0 else copy * weights[rank]
            self._wire.all_reduce(mean)
            # The mean is the same on all ranks, and its norm is counted once.
            measured = AverageSums(total.squares, total.norm + (0.0 if rank else squared(mean)))
            if weights[rank] < 0:
                copy.copy_(mean)
            else:
                measured.squares[rank] += squared(copy - mean)
            total = measured
            moved(self._outer, kept, look, mean, [copy], workers)
        return total


def _combine(
    copies: Sequence[Tensor], weights: Sequence[float], move: Callable[[Tensor, Sequence[Tensor], int], None]
) -> AverageSums:
    live = [rank for rank, weight in enumerate(weights) if weight >= 0]
    first, *others = live
    mean = copies[first] * weights[first]
    for rank in others:
        mean.add_(copies[rank], alpha=weights[rank])
    squares = [0.0] * len(weights)
    for rank, copy in enumerate(copies):
        if weights[rank] < 0:
            copy.copy_(mean)
        elif others:
            squares[rank] = squared(copy - mean)
    norm = squared(mean)
    move(mean, copies, len(live))
    return AverageSums(squares, norm)


def moved(
    outer: OuterStep, kept: Sequence[Tensor], look: bool, mean: Tensor, copies: Sequence[Tensor], workers: int
) -> None:
    """Lets the outer step move copies, or the trained model stand in their places."""
    if not look:
        outer.step(kept, mean, copies, workers)
        return
    model = outer.model(kept, mean)
    for copy in copies:
        copy.copy_(model)


def squared(tensor: Tensor) -> float:
    """Returns the sum of squares of all elements."""
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _plus(one: AverageSums, other: AverageSums) -> AverageSums:
    return AverageSums([a + b for a, b in zip(one.squares, other.squares, strict=True)], one.norm + other.norm)


class ExtraState:
    """Args:
    buffers: running statistics.
    state: of the optimizer.
    make: returns what averages tensors of a layout.

    Attributes:
        nbytes: that it adds to the host.
    """

    def __init__(
        self, buffers: Sequence[Tensor], state: MeanState, make: Callable[[FlatLayout], WorkerAverage]
    ) -> None:
        self._buffers = list(buffers)
        self._state = state
        tensors = [*self._buffers, *(like.value for like in state.likes)]
        self._average = make(FlatLayout([describe_tensor(str(index), tensor) for index, tensor in enumerate(tensors)]))
        views = self._average.layout.views(self._average.own)
        self._statistics, self._kept = views[: len(self._buffers)], views[len(self._buffers) :]
        self.nbytes = self._average.nbytes

    @property
    def elements(self) -> list[Tensor]:
        """This worker's copy, flat."""
        return self._average.elements

    def gather(self) -> None:
        """Brings this worker's to where it is averaged."""
        for buffer, view in zip(self._buffers, self._statistics, strict=True):
            view.copy_(buffer)
        self._state.gather(self._kept)

    def combine(self, weights: Sequence[float]) -> None:
        """Averages; see `WorkerAverage`."""
        self._average.combine(weights)

    def spread(self) -> None:
        """Brings the means back."""
        for buffer, view in zip(self._buffers, self._statistics, strict=True):
            buffer.copy_(view)
        self._state.spread(self._kept)


def remainder(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    average_state: bool,
    make: Callable[[FlatLayout], WorkerAverage],
) -> ExtraState | None:
    """Returns what is averaged beside the parameters; None where there is nothing.

    Args:
        module: the model.
        optimizer: over its parameters.
        average_state: whether its state is averaged.
        make: see `ExtraState`.

    Raises:
        UsageError: the state has no mean.
    """
    buffers = averaged_buffers(module)
    state = mean_state(dict(module.named_parameters()), optimizer) if average_state else MeanState(optimizer, {}, {})
    return ExtraState(buffers, state, make) if buffers or state.likes else None
