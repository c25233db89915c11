"""Buckets of gradients, which leave for a collective while backward still computes.

    backward    │ layer 4 │ layer 3 │ layer 2 │ layer 1 │
    all-reduce            │ bucket 0 (4, 3)   │ bucket 1 (2, 1) │

It pays where the transport works by itself (NCCL on a GPU's copy engines, a network card). On a CPU host the cores that
would exchange are those that compute, so it is not used there: see benchmarks/overlap.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor

from headrace import internals
from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.compression import Compression
from headrace.errors import UsageError
from headrace.internals import foreach_copy_, foreach_zero_
from headrace.shared_memory.layout import on_lines
from headrace.spec.model import ParameterSpec
from headrace.training.gradients import FlatLayout, GradientUse, assign

# For each parameter in every step, which is why this is no call of `internals`.
_writes = attrgetter(internals.version.name)


class BucketSink:
    """Takes gradients from `.grad` as backward makes them, and starts the all-reduce of each bucket that is complete.

    One hook a bucket looks whether all its gradients are there: on the parameter that had its gradient last, which the
    first backward pass tells. Where a later pass takes another way, the next hook or the end of the pass sends what is
    complete, and the pass after it tells anew. One call copies a bucket's gradients to its flat memory, and `.grad`
    lies there from then on, so that gradients exist twice for one bucket at a time.

    Buckets leave in the same order on every worker, whatever the order in which their gradients come. A parameter
    without a gradient holds its bucket back until backward is over.

    Args:
        region: the flat memory, `(layout.nbytes,)` uint8.
        early: whether buckets leave during backward; else all leave at its end, the same ones.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        sizes: Sequence[int],
        layout: FlatLayout,
        region: Tensor,
        used: GradientUse,
        collective: Collective,
        compression: Compression,
        early: bool = True,
    ) -> None:
        # A gradient that lies on a device cannot be in host memory, where such a sum is.
        self.early = early and all(each.device == region.device for each in parameters)
        self._parameters = parameters
        self._collective = collective
        self._compression = compression
        self._used = used
        self._summed = used if isinstance(used, SummedUse) else None
        self._runs = buckets(sizes, *collective.bucket_bytes)
        # What is a `.data` counts its own writes: those to each bucket, and to each gradient that backward adds to.
        self._bases = [region.data for _ in self._runs]
        self._views: list[Tensor] = []
        for base, (start, stop) in reversed([*zip(self._bases, self._runs, strict=True)]):
            self._views += [layout.view(base, name) for name in layout.names[start:stop]]
        self._added = [view.data for view in self._views]
        self._flats = [layout.runs(region, start, stop) for start, stop in self._runs]
        if self._flats and self._summed:
            # The last bucket lies first.
            self._flats[-1][0] = self._summed.joined(self._flats[-1][0])
        self._sent = 0
        self._written: list[int] = []
        self._before: list[tuple[Tensor | None, int]] = []
        self._last: list[int] = []
        self._came: list[int] = []
        self._too_soon: set[int] = set()
        self._waiting: set[int] = set()
        self._waits: list[Callable[[], None]] = []

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """See `GradientSink`."""
        self._require_sent(gradients)
        self._used.publish(gradients)
        if self._sent < len(self._runs):
            rest = slice(0, self._runs[self._sent][1])
            _bring(self._views[rest], gradients[rest])
            while self._sent < len(self._runs):
                self._send()
        self._begin()

    def store_nothing(self) -> None:
        """See `GradientSink`."""
        self.store([None] * len(self._views))

    def gather(self) -> None:
        """See `EarlySink`."""
        _bring(self._views, [parameter.grad for parameter in self._parameters])
        for parameter, view in zip(self._parameters, self._added, strict=True):
            if parameter.grad is not None:
                parameter.grad = view

    @contextmanager
    def sending(self, first: bool = True) -> Iterator[None]:
        """See `EarlySink`."""
        # What is sent before backward is over has all gradients.
        if self._summed:
            self._summed.expect_all()
        present = () if first else [parameter.grad for parameter in self._parameters]
        self._before = [(each, -1 if each is None else _writes(each)) for each in present]
        watches = not self._last
        self._came.clear()
        self._too_soon.clear()
        self._waiting.clear()
        looks = ((index, partial(self._look, number)) for number, index in enumerate(self._last))
        notes = ((index, partial(self._note, index)) for index in range(len(self._parameters)))
        hooks = [
            self._parameters[index].register_post_accumulate_grad_hook(hook)
            for index, hook in (notes if watches else looks)
            # torch has none on what user code has frozen.
            if self._parameters[index].requires_grad
        ]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()
        if watches:
            self._choose()
        elif any(self._made(number) is not None for number in self._too_soon):
            self._last.clear()
        self._send_complete()

    def wait(self) -> None:
        """Waits until all buckets are summed."""
        for wait in self._waits:
            wait()
        self._waits.clear()

    def drop(self) -> None:
        """Drops sums of a round that is done again, which may be on their way in the group that was."""
        self._waits.clear()
        self._begin()

    def _note(self, index: int, parameter: Tensor) -> None:
        self._came.append(index)
        self._send_complete()

    def _look(self, number: int, parameter: Tensor) -> None:
        gradients = self._made(number) if number >= self._sent else None
        if number == self._sent and gradients is not None:
            self._bucket(gradients)
        elif number >= self._sent:
            (self._waiting if gradients is not None else self._too_soon).add(number)
            if number == self._sent:
                return
        # The other buckets have no new gradients, or their hooks are yet to come.
        if self._sent in self._waiting or self._sent in self._too_soon:
            self._send_complete()

    def _choose(self) -> None:
        """Chooses each bucket's hook, after a pass in which every parameter had one."""
        turn = {index: number for number, index in enumerate(self._came)}
        self._last = [max(range(*run), key=lambda index: turn.get(index, -1)) for run in self._runs]

    def _made(self, number: int) -> list[Tensor] | None:
        """Returns a bucket's gradients, if this pass has made all of them."""
        run = slice(*self._runs[number])
        gradients = [parameter.grad for parameter in self._parameters[run]]
        if not all(map(operator.is_not, gradients, repeat(None))):
            return None
        made = cast(list[Tensor], gradients)
        pairs = zip(made, self._before[run], strict=True) if self._before else ()
        if any(gradient is before and _writes(gradient) == writes for gradient, (before, writes) in pairs):
            return None
        return made

    def _send_complete(self) -> None:
        while self._sent < len(self._runs) and (gradients := self._made(self._sent)) is not None:
            self._bucket(gradients)

    def _bucket(self, gradients: list[Tensor]) -> None:
        """Sends the next bucket, whose gradients these are."""
        run = slice(*self._runs[self._sent])
        views = self._views[run]
        if self._before:
            _bring(views, gradients)
        else:
            foreach_copy_(views, gradients)
        assign(self._parameters[run], views)
        self._written.append(_writes(self._bases[self._sent]))
        self._send()

    def _send(self) -> None:
        self._waits += [self._collective.start_all_reduce(flat, self._compression) for flat in self._flats[self._sent]]
        self._sent += 1

    def _require_sent(self, gradients: Sequence[Tensor | None]) -> None:
        """Raises a UsageError if a gradient is not the one that was sent."""
        if not self._written:
            return
        sent = slice(self._runs[len(self._written) - 1][0], None)
        same = all(map(operator.is_, gradients[sent], self._views[sent]))
        if same and self._written == [*map(_writes, self._bases[: len(self._written)])]:
            return
        raise UsageError(
            "a parameter had another gradient after its bucket was sent: forward or backward calls backward() or "
            "writes to .grad by itself; use overlap=False, which sends gradients when backward is over"
        )

    def _begin(self) -> None:
        """Expects the next backward."""
        self._sent = 0
        self._written.clear()


def _bring(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copies gradients to where they are sent from, by one call; those that are missing are 0."""
    empty = [view for view, gradient in zip(views, gradients, strict=True) if gradient is None]
    places = zip(views, gradients, strict=True)
    pairs = [(view, each) for view, each in places if each is not None and each.data_ptr() != view.data_ptr()]
    if empty:
        foreach_zero_(empty)
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        foreach_copy_(targets, sources)


class SummedUse(GradientUse):
    """Finds the parameters without a gradient by a sum of the devices.

        counts │ gradients of a bucket        how many workers have one, by parameter; leaves with the bucket

    Who has all gradients knows that none is missing, and waits neither for its device nor for the others. The meeting
    that keeps workers in step, and notices a lost one, ends when the update has been asked for.

    Args:
        wait: returns when the device's queue has the sums.

    Attributes:
        region: the flat memory of the gradients, `(nbytes,)` uint8.
    """

    def __init__(
        self, group: ProcessGroup, parameters: Sequence[ParameterSpec], device: torch.device, wait: Callable[[], None]
    ) -> None:
        self._group, self._wait = group, wait
        self.meets_later = group if group.start_barrier else None
        # Of the type that lies first in the region.
        dtype = getattr(torch, parameters[0].dtype) if parameters else torch.float32
        nbytes = len(parameters) * dtype.itemsize
        lead = on_lines(nbytes)
        self._whole = torch.zeros(lead + FlatLayout(parameters).nbytes, dtype=torch.uint8, device=device)
        self._counts = self._whole[:nbytes].view(dtype)
        self.region = self._whole[lead:]
        self._missing: tuple[int, ...] = ()
        self._expected = False
        self._leave: Callable[[], None] | None = None

    def joined(self, flat: Tensor) -> Tensor:
        """Returns the gradients that lie first in memory with the counts, which are summed with them."""
        nbytes = self.region.data_ptr() - self._whole.data_ptr() + flat.nbytes
        return self._whole[:nbytes].view(flat.dtype)

    def expect_all(self) -> None:
        """Notes that this worker has all gradients, before it has published."""
        self._expected = True
        self._counts.fill_(1)

    def publish(self, gradients: Sequence[Tensor | None]) -> bool:
        complete = all(map(operator.is_not, gradients, repeat(None)))
        self._missing = () if complete else tuple(index for index, each in enumerate(gradients) if each is None)
        if self._missing:
            present = [gradient is not None for gradient in gradients]
            self._counts.copy_(torch.tensor(present).to(self._counts.dtype))
        elif not self._expected:
            self._counts.fill_(1)
        # Else they may have been sent already.
        self._expected = False
        return not self._missing

    def publish_nothing(self) -> None:
        self.publish([None] * len(self._counts))

    def settle(self) -> tuple[int, ...]:
        start = self._group.start_barrier
        self._leave = start() if start else self._group.barrier()
        if not self._missing or self._group.world == 1:
            return self._missing
        self._wait()
        return tuple((self._counts == 0).nonzero().flatten().tolist())

    def leave(self) -> None:
        if self._leave:
            self._leave()
        self._leave = None


def sum_over(mates: Collective, gradients: Sequence[Tensor], device: torch.device | None = None) -> None:
    """Replaces flat gradients by their sums over ranks, many in a call: a call for each takes longer than the bytes.

    `device` is where they are summed, if it is not where they lie.
    """
    for dtype in dict.fromkeys(each.dtype for each in gradients):
        same = [each for each in gradients if each.dtype == dtype]
        for start, stop in buckets([each.nbytes for each in same], *mates.bucket_bytes):
            flat = torch.cat([each.to(device or each.device) for each in same[start:stop]])
            # Of fewer rows than ranks some have none, and so have their mates.
            if flat.numel():
                mates.all_reduce(flat)
            foreach_copy_(same[start:stop], flat.split([len(each) for each in same[start:stop]]))


def buckets(sizes: Sequence[int], first_bytes: int, most_bytes: int) -> tuple[tuple[int, int], ...]:
    """Returns runs `(start, stop)` of parameter indices, in the order in which their gradients are ready.

    `sizes` are the bytes of each parameter, in the model's order. Backward runs from the last parameter to the first,
    so the first bucket ends with the last parameter. A bucket closes as soon as it has its bytes: `first_bytes`, and
    each next one twice as many, at most `most_bytes`. None would still be that large without its own first parameter;
    the last holds what is left.

    >>> buckets((40, 10, 10, 30, 5), 20, 20)
    ((3, 5), (1, 3), (0, 1))
    >>> buckets((10, 10, 10, 10, 10), 10, 20)
    ((4, 5), (2, 4), (0, 2))

    Raises:
        UsageError: `first_bytes` is below 1, or above `most_bytes`.
    """
    if not 1 <= first_bytes <= most_bytes:
        raise UsageError(f"the first bucket must have 1 to {most_bytes} bytes, got {first_bytes}")
    runs = []
    stop = len(sizes)
    held, bucket_bytes = 0, first_bytes
    for start in reversed(range(len(sizes))):
        held += sizes[start]
        if held >= bucket_bytes or start == 0:
            runs.append((start, stop))
            stop, held = start, 0
            bucket_bytes = min(2 * bucket_bytes, most_bytes)
    return tuple(runs)
