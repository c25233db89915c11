"""Averages the workers' copies of the same tensors: in shared memory, or by a collective.

In shared memory all workers see every copy. Rank r averages the r-th part of all copies, and writes the result into
each of them:

    worker 0   │ steps on C0 ─┐            ┌─► part 0 of C0, C1 ◄─ mean of part 0 ─┐
               │              ├─ barrier ──┤                                       ├─ barrier ──► steps on C0
    worker 1   │ steps on C1 ─┘            └─► part 1 of C0, C1 ◄─ mean of part 1 ─┘

Workers that rarely synchronize step on memory of their own, which may lie in large pages, and copy it there and back.

What is averaged beside the parameters, running statistics and optimizers' state, is `ExtraState`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from headrace.averaging.outer_steps import OuterStep
from headrace.collectives.base import Collective, ProcessGroup
from headrace.training.gradients import ByteRange, FlatLayout
from headrace.training.optimizer import Factory
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.training.synchronization import MeanState, describe_tensor, mean_state
from headrace.transport.codec import CODECS, codec_for

_CHUNK = 65_536
"""Elements that are averaged at a time, so that they stay in a core's cache."""


@dataclass
class AverageSums:
    """Sums over the elements that a rank has averaged; added up over ranks they are those of the whole."""

    squares: list[float]
    norm: float


class WorkerAverage(ABC):
    """Averages the workers' copies.

    `local` is this worker's copy, `(nbytes,)` uint8, and `shown` is where the others see it, if it is not there. In the
    same form, `outer_state` is that of the `outer` step, and `lost` what was lost of what this worker sent, which
    is sent with the next. `nbytes` is what this rank adds to the host. `mean` makes another mean of values and weights.
    """

    layout: FlatLayout
    local: Tensor
    shown: Tensor | None = None
    outer_state: tuple[Tensor, ...]
    lost: tuple[Tensor, ...] = ()
    nbytes: int
    outer: OuterStep
    mean: Callable[[Sequence[Tensor], Sequence[float]], Tensor] | None = None

    @property
    def elements(self) -> list[Tensor]:
        """This worker's copy, flat, one tensor a type."""
        return [span.of(self.local) for span in self.layout.spans]

    def begin(self) -> None:
        """Begins what is kept as the copies, which are all alike."""
        for region in self.outer_state[:1]:
            region.copy_(self.local)

    def publish(self) -> None:
        """Copies this worker's copy to where the others see it; a barrier follows before ranks combine them."""
        if self.shown is not None:
            self.shown.copy_(self.local)

    def take(self) -> None:
        """Copies it back, after another barrier."""
        if self.shown is not None:
            self.local.copy_(self.shown)

    @abstractmethod
    def combine(self, weights: Sequence[float], preview: bool = False) -> AverageSums:
        """Averages the copies, and applies the outer step, here or in `apply`; a barrier comes before and after.

        `weights` are those of the copies in their mean, by rank, with a sum of 1; a copy that is left out has a
        negative one, and is replaced by the mean first. `preview` writes the trained model into every copy, and leaves
        what is kept as it is.
        """

    def apply(self) -> None:  # noqa: B027  (in memory that is shared, each rank changes its part of all copies before)
        """Applies the outer step after the barrier, where `combine` has left the copies as they were."""

    def regroup(self) -> None:
        """Goes on with the members that a collective has now."""
        raise NotImplementedError("the workers whose copies are averaged stay the same")


class SharedMemoryAverage(WorkerAverage):
    """Averages in shared memory.

    If `apart`, or on an accelerator, this worker's copy lies in memory of its own between synchronizations.
    """

    def __init__(
        self, layout: FlatLayout, group: ProcessGroup, outer: OuterStep, apart: bool, device: torch.device
    ) -> None:
        self.layout = layout
        regions = group.share(layout.nbytes)
        self.local = regions[group.rank]
        apart = apart or device != self.local.device
        if apart:
            self.local, self.shown = torch.zeros_like(self.local, device=device), self.local
        # One for all, of which each rank moves its part.
        self.outer_state = tuple(group.share(0 if group.rank else layout.nbytes)[0] for _ in range(outer.copies_kept))
        self.nbytes = layout.nbytes * (1 + apart + (0 if group.rank else outer.copies_kept))
        parts = [span.part(group.rank, group.world) for span in layout.spans]
        self._copies = [[part.of(region) for region in regions] for part in parts]
        self._outer_state = [[part.of(region) for region in self.outer_state] for part in parts]
        self._group = group
        self.outer = outer
        # It reads its part of the others' copies, and writes the mean into it: 2 (N - 1)/N of a copy.
        self._traffic = 2 * layout.nbytes * (group.world - 1) // group.world

    def combine(self, weights: Sequence[float], preview: bool = False) -> AverageSums:
        total = AverageSums([0.0] * len(weights), 0.0)
        for every in zip(self._copies, self._outer_state, strict=True):
            for start in range(0, len(every[0][0]), _CHUNK):
                copies, state = ([region[start : start + _CHUNK] for region in regions] for regions in every)
                self._combine(copies, state, weights, preview, total)
        self._group.moved_bytes += self._traffic
        return total

    def _combine(
        self, copies: list[Tensor], state: list[Tensor], weights: Sequence[float], preview: bool, total: AverageSums
    ) -> None:
        """Averages some elements, and adds their sums to `total`."""
        live = [rank for rank, weight in enumerate(weights) if weight >= 0]
        first, *others = live
        if self.mean is not None:
            mean = self.mean([copies[rank] for rank in live], [weights[rank] for rank in live])
        else:
            mean = copies[first] * weights[first]
            for rank in others:
                mean.add_(copies[rank], alpha=weights[rank])
        for rank, copy in enumerate(copies):
            if weights[rank] < 0:
                copy.copy_(mean)
            elif others:
                total.squares[rank] += squared(copy - mean)
        total.norm += squared(mean)
        apply_outer(self.outer, state, preview, mean, copies, len(live))


class CollectiveAverage(WorkerAverage):
    """Averages by a collective; each rank holds all that is kept.

    The copies change in `apply`: a member that is lost before leaves the others' as they were.

    With a `codec` that loses something, "bf16" or "int8", each rank sends how far its copy has moved from the anchor:
    what all have had in common since the last synchronization.
    """

    def __init__(
        self, layout: FlatLayout, collective: Collective, device: torch.device, outer: OuterStep, codec: str = "plain"
    ) -> None:
        self.layout = layout
        coded = codec != "plain"
        # What the codec has lost of all that this worker sent, and of the piece that it answered with.
        losses = 2 if CODECS[codec].feedback else 0
        count = 1 + coded + losses + outer.copies_kept
        self.local, *more = (torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(count))
        self._anchor = more.pop() if coded else None
        self.lost, self.outer_state = tuple(more[:losses]), tuple(more[losses:])
        self.nbytes = layout.nbytes * count
        self._codec = codec
        self._device = device
        self._collective = collective
        self.outer = outer
        self._apply: Callable[[], None] = _nothing
        self._coded: list[_CodedMean] = []
        self.regroup()

    def regroup(self) -> None:
        if self._anchor is not None:
            spans = self.layout.spans
            self._coded = [_CodedMean(span, self._collective, self._codec, self._device) for span in spans]
        for region in self.lost:
            region.zero_()

    def begin(self) -> None:
        super().begin()
        if self._anchor is not None:
            self._anchor.copy_(self.outer_state[0] if self.outer_state else self.local)

    def combine(self, weights: Sequence[float], preview: bool = False) -> AverageSums:
        total, rank = AverageSums([0.0] * len(weights), 0.0), self._collective.rank
        means = []
        for index, span in enumerate(self.layout.spans):
            copy = span.of(self.local)
            if self.mean is not None:
                rows = self._collective.gather(copy.view(torch.uint8)).unbind()
                live = [rank for rank, weight in enumerate(weights) if weight >= 0]
                mean = self.mean([rows[each].view(copy.dtype) for each in live], [weights[each] for each in live])
            elif self._anchor is None:
                mean = torch.zeros_like(copy) if weights[rank] < 0 else copy * weights[rank]
                self._collective.all_reduce(mean)
            else:
                anchor, lost = span.of(self._anchor), [span.of(region) for region in self.lost]
                apart = torch.zeros_like(copy) if weights[rank] < 0 else anchor - copy
                mean = anchor - self._coded[index].mean(apart, weights, [e.clone() for e in lost] if preview else lost)
            # The mean is the same on all ranks, and its norm is counted once.
            total.norm += 0.0 if rank else squared(mean)
            if weights[rank] >= 0:
                total.squares[rank] += squared(copy - mean)
            means.append(mean)
        self._apply = partial(self._move, means, sum(weight >= 0 for weight in weights), weights[rank] < 0, preview)
        return total

    def apply(self) -> None:
        self._apply()
        self._apply = _nothing

    def _move(self, means: Sequence[Tensor], workers: int, left_out: bool, preview: bool) -> None:
        for span, mean in zip(self.layout.spans, means, strict=True):
            copy, state = span.of(self.local), [span.of(region) for region in self.outer_state]
            if left_out:
                copy.copy_(mean)
            apply_outer(self.outer, state, preview, mean, [copy], workers)
            if self._anchor is not None and not preview:
                span.of(self._anchor).copy_(state[0] if state else copy)


def _nothing() -> None:
    """Where nothing is to be applied."""


class _CodedMean:
    """The mean of the elements of one type in fewer bits; these are cut into a piece for each rank, which owns it.

        worker i   d_i                             every piece of enc(d_i + what was lost before) to the piece's owner
        owner      d = sum of weight_i dec(d_i)    enc(d + what was lost before) to all
        all        dec(d)                          the same bits everywhere

    Each worker sends 2 (N - 1)/N of the encoded elements, and receives as many, as in a ring.
    """

    def __init__(self, span: ByteRange, collective: Collective, codec: str, device: torch.device) -> None:
        self._collective = collective
        self._device = device
        self._codec = codec_for(codec, span.dtype)
        parts, size = [span.part(rank, collective.world) for rank in range(collective.world)], span.dtype.itemsize
        bounds = [((part.start - span.start) // size, (part.stop - span.start) // size) for part in parts]
        self._pieces = [slice(*bound) for bound in bounds]
        self._lengths = [self._codec.nbytes(stop - start, span.dtype) for start, stop in bounds]

    def mean(self, apart: Tensor, weights: Sequence[float], lost: Sequence[Tensor]) -> Tensor:
        """Returns the weighted mean of every rank's `apart`, as decoded: the same on all ranks.

        `weights` are those of `WorkerAverage.combine`; `lost` is what this rank has lost, changed by this, and empty
        where the codec loses next to nothing.
        """
        rank = self._collective.rank
        sent = self._rows(self._collective.world)
        for row, piece, length in zip(sent, self._pieces, self._lengths, strict=True):
            # What has no weight must not take with it what was lost before.
            counts = lost and weights[rank] > 0
            self._codec.encode(apart[piece], row[:length], lost[0][piece] if counts else None)
        piece, length = self._pieces[rank], self._lengths[rank]
        total = torch.zeros_like(apart[piece])
        one = torch.empty_like(total)
        for weight, row in zip(weights, self._collective.all_to_all(sent), strict=True):
            if weight > 0:
                self._codec.decode(row[:length], one)
                total.add_(one, alpha=weight)
        (answer,) = self._rows(1)
        self._codec.encode(total, answer[:length], lost[1][piece] if lost else None)
        mean = torch.empty_like(apart)
        for row, piece, length in zip(self._collective.gather(answer), self._pieces, self._lengths, strict=True):
            self._codec.decode(row[:length], mean[piece])
        return mean

    def _rows(self, count: int) -> Tensor:
        # Rows begin at multiples of 8 bytes, as codecs need it.
        return torch.zeros(count, -(-max(self._lengths) // 8) * 8, dtype=torch.uint8, device=self._device)


def apply_outer(
    outer: OuterStep, state: Sequence[Tensor], preview: bool, mean: Tensor, copies: Sequence[Tensor], workers: int
) -> None:
    """Applies the outer step to copies, or writes the trained model into them."""
    if not preview:
        outer.step(state, mean, copies, workers)
        return
    model = outer.model(state, mean)
    for copy in copies:
        copy.copy_(model)


def squared(tensor: Tensor) -> float:
    """Returns the sum of squares of all elements."""
    return float(torch.linalg.vector_norm(tensor)) ** 2


class ExtraState:
    """Averages running statistics (`buffers`) and the optimizers' state; `make` builds the average of a layout."""

    def __init__(
        self, buffers: Sequence[Tensor], state: MeanState, make: Callable[[FlatLayout], WorkerAverage]
    ) -> None:
        self._buffers = list(buffers)
        self._state = state
        tensors = [*self._buffers, *(like.value for like in state.likes)]
        self._average = make(FlatLayout([describe_tensor(str(index), tensor) for index, tensor in enumerate(tensors)]))
        views = self._average.layout.views(self._average.local)
        self._statistics, self._optimizer_state = views[: len(self._buffers)], views[len(self._buffers) :]
        self.nbytes = self._average.nbytes

    @property
    def elements(self) -> list[Tensor]:
        """See `WorkerAverage`."""
        return self._average.elements

    def gather(self) -> None:
        """Copies this worker's to where it is averaged."""
        for buffer, view in zip(self._buffers, self._statistics, strict=True):
            view.copy_(buffer)
        self._state.gather(self._optimizer_state)
        self._average.publish()

    def combine(self, weights: Sequence[float]) -> None:
        """Averages; see `WorkerAverage`."""
        self._average.combine(weights)

    def regroup(self) -> None:
        """See `WorkerAverage`."""
        self._average.regroup()

    def spread(self) -> None:
        """Copies the means back."""
        self._average.apply()
        self._average.take()
        for buffer, view in zip(self._buffers, self._statistics, strict=True):
            buffer.copy_(view)
        self._state.spread(self._optimizer_state)


def extra_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    factory: Factory,
    average_state: bool,
    make: Callable[[FlatLayout], WorkerAverage],
) -> ExtraState | None:
    """Returns what averages a module's running statistics, and its optimizer's state if asked; None for neither.

    Raises UsageError if the state has no mean.
    """
    buffers = averaged_buffers(module)
    named = dict(module.named_parameters())
    state = mean_state(named, optimizer, factory) if average_state else MeanState(optimizer, {}, {})
    return ExtraState(buffers, state, make) if buffers or state.likes else None
