"""The mean of the workers' copies in fewer bits: each sends, encoded, how far its copy has moved.

    worker i   d_i = anchor - copy_i           every piece of enc(d_i + what was lost before) to the piece's owner
    owner      d = sum of weight_i dec(d_i)    enc(d + what was lost before) to all
    all        mean = anchor - dec(d)          the same bits everywhere

The anchor is what all have had in common since the last synchronization. Each worker sends 2 (N - 1)/N of the encoded
parameters, and receives as many, as in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.averaging.outer_steps import OuterStep
from headrace.averaging.worker_average import AverageSums, WorkerAverage, apply_outer, squared
from headrace.collectives.base import Collective
from headrace.training.gradients import ByteRange, FlatLayout
from headrace.transport.codec import CODECS, codec_for


class CodedAverage(WorkerAverage):
    """Averages by a collective that carries encoded differences: `codec` is "bf16" or "int8"."""

    def __init__(
        self, layout: FlatLayout, collective: Collective, device: torch.device, outer: OuterStep, codec: str
    ) -> None:
        self.layout = layout
        # What the codec has lost of all that this worker sent, and of the piece that it answered with.
        losses = 2 if CODECS[codec].feedback else 0
        count = 2 + outer.copies_kept + losses
        self.own, self._anchor, *more = (
            torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(count)
        )
        self.lost, self.kept = tuple(more[:losses]), tuple(more[losses:])
        self._rank = collective.rank
        self._outer = outer
        self._means = [_CodedMean(span, collective, codec, device) for span in layout.spans]
        self.nbytes = layout.nbytes * count

    def begin(self) -> None:
        super().begin()
        self._anchor.copy_(self.kept[0] if self.kept else self.own)

    def combine(self, weights: Sequence[float], preview: bool = False) -> AverageSums:
        total, rank = AverageSums([0.0] * len(weights), 0.0), self._rank
        workers = sum(weight >= 0 for weight in weights)
        for coded in self._means:
            copy, anchor = coded.span.of(self.own), coded.span.of(self._anchor)
            kept, lost = ([coded.span.of(region) for region in regions] for regions in (self.kept, self.lost))
            if weights[rank] < 0:
                copy.copy_(anchor)
            mean = anchor - coded.mean(anchor - copy, weights, [each.clone() for each in lost] if preview else lost)
            total.norm += 0.0 if rank else squared(mean)
            if weights[rank] < 0:
                copy.copy_(mean)
            else:
                total.squares[rank] += squared(copy - mean)
            apply_outer(self._outer, kept, preview, mean, [copy], workers)
            if not preview:
                anchor.copy_(kept[0] if kept else copy)
        return total


class _CodedMean:
    """The mean of the elements of one type, which are cut into a piece for each rank."""

    def __init__(self, span: ByteRange, collective: Collective, codec: str, device: torch.device) -> None:
        self.span = span
        self._collective = collective
        self._device = device
        self._codec = codec_for(codec, span.dtype)
        parts, size = [span.part(rank, collective.world) for rank in range(collective.world)], span.dtype.itemsize
        bounds = [((part.start - span.start) // size, (part.stop - span.start) // size) for part in parts]
        self._pieces = [slice(*bound) for bound in bounds]
        self._lengths = [self._codec.nbytes(stop - start, span.dtype) for start, stop in bounds]

    def mean(self, apart: Tensor, weights: Sequence[float], lost: Sequence[Tensor]) -> Tensor:
        """Returns the weighted mean of every rank's `apart`, as decoded: the same on all ranks.

        `weights` are those of `WorkerAverage.combine`; `lost` is that of `CodedAverage`, changed by this, and empty
        where the codec loses next to nothing.
        """
        rank = self._collective.rank
        sent = self._rows(self._collective.world)
        for row, piece, length in zip(sent, self._pieces, self._lengths, strict=True):
            # What has no weight must not take with it what was lost before.
            counts = lost and weights[rank] > 0
            self._codec.encode(apart[piece], row[:length], lost[0][piece] if counts else None)
        own, length = self._pieces[rank], self._lengths[rank]
        total = torch.zeros_like(apart[own])
        one = torch.empty_like(total)
        for weight, row in zip(weights, self._collective.all_to_all(sent), strict=True):
            if weight > 0:
                self._codec.decode(row[:length], one)
                total.add_(one, alpha=weight)
        (answer,) = self._rows(1)
        self._codec.encode(total, answer[:length], lost[1][own] if lost else None)
        mean = torch.empty_like(apart)
        for row, piece, length in zip(self._collective.gather(answer), self._pieces, self._lengths, strict=True):
            self._codec.decode(row[:length], mean[piece])
        return mean

    def _rows(self, count: int) -> Tensor:
        # Rows begin at multiples of 8 bytes, as codecs need it.
        return torch.zeros(count, -(-max(self._lengths) // 8) * 8, dtype=torch.uint8, device=self._device)
