"""The mean of the workers' copies in fewer bits: what goes over the wire is how far each has come, encoded.

    worker i   d_i = anchor - copy_i           every piece of enc(d_i + what was lost before) to the piece's owner
    owner      d = sum of weight_i dec(d_i)    enc(d + what was lost before) to everybody
    all        mean = anchor - dec(d)          the same bits everywhere

The anchor is what all have in common since the last meeting. Each worker sends 2 (N - 1)/N of the encoded parameters,
and receives as many, as in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.averaging.outer_steps import OuterStep
from headrace.averaging.worker_average import AverageSums, WorkerAverage, moved, squared
from headrace.collectives.base import Collective
from headrace.training.gradients import ByteRange, FlatLayout
from headrace.transport.codec import CODECS, codec_for


class CodedAverage(WorkerAverage):
    """Args:
    layout: places of the tensors; of floating-point types alone.
    wire: of all workers.
    device: where the tensors live.
    outer: what becomes of the copies.
    codec: "bf16" or "int8".
    """

    def __init__(
        self, layout: FlatLayout, wire: Collective, device: torch.device, outer: OuterStep, codec: str
    ) -> None:
        self.layout = layout
        # What this worker has lost of all that it sent, and of the piece that it answered with.
        losses = 2 if CODECS[codec].feedback else 0
        count = 2 + outer.copies_kept + losses
        self.own, self._anchor, *more = (
            torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(count)
        )
        self.lost, self.kept = tuple(more[:losses]), tuple(more[losses:])
        self._rank = wire.rank
        self._outer = outer
        self._ways = [_Way(span, wire, codec, device) for span in layout.spans]
        self.nbytes = layout.nbytes * count

    def begin(self) -> None:
        super().begin()
        self._anchor.copy_(self.kept[0] if self.kept else self.own)

    def combine(self, weights: Sequence[float], look: bool = False) -> AverageSums:
        squares, norm, rank = [0.0] * len(weights), 0.0, self._rank
        workers = sum(weight >= 0 for weight in weights)
        for way in self._ways:
            copy, anchor = way.span.of(self.own), way.span.of(self._anchor)
            kept, lost = ([way.span.of(region) for region in regions] for regions in (self.kept, self.lost))
            if weights[rank] < 0:
                copy.copy_(anchor)
            mean = anchor - way.mean(anchor - copy, weights, [each.clone() for each in lost] if look else lost)
            norm += 0.0 if rank else squared(mean)
            if weights[rank] < 0:
                copy.copy_(mean)
            else:
                squares[rank] += squared(copy - mean)
            moved(self._outer, kept, look, mean, [copy], workers)
            if not look:
                anchor.copy_(kept[0] if kept else copy)
        return AverageSums(squares, norm)


class _Way:
    """Over the wire and back, for the elements of one type: they are cut into a piece for each rank.

    Args:
        span: where they lie.
        wire: of all workers.
        codec: its name.
        device: where they live.
    """

    def __init__(self, span: ByteRange, wire: Collective, codec: str, device: torch.device) -> None:
        self.span = span
        self._wire = wire
        self._device = device
        self._codec = codec_for(codec, span.dtype)
        parts, size = [span.part(rank, wire.world) for rank in range(wire.world)], span.dtype.itemsize
        bounds = [((part.start - span.start) // size, (part.stop - span.start) // size) for part in parts]
        self._pieces = [slice(*bound) for bound in bounds]
        self._lengths = [self._codec.nbytes(stop - start, span.dtype) for start, stop in bounds]

    def mean(self, apart: Tensor, weights: Sequence[float], lost: Sequence[Tensor]) -> Tensor:
        """Returns the weighted mean of what every rank gives, as far as it has come over the wire: the same on all.

        Args:
            apart: what this rank gives.
            weights: as of `WorkerAverage.combine`.
            lost: see `CodedAverage`; changed by this. Empty where the codec loses next to nothing.
        """
        rank = self._wire.rank
        sent = self._rows(self._wire.world)
        for row, piece, length in zip(sent, self._pieces, self._lengths, strict=True):
            # What counts for nothing must not take with it what was lost before.
            counts = lost and weights[rank] > 0
            self._codec.encode(apart[piece], row[:length], lost[0][piece] if counts else None)
        own, length = self._pieces[rank], self._lengths[rank]
        total = torch.zeros_like(apart[own])
        one = torch.empty_like(total)
        for weight, row in zip(weights, self._wire.trade(sent), strict=True):
            if weight > 0:
                self._codec.decode(row[:length], one)
                total.add_(one, alpha=weight)
        (answer,) = self._rows(1)
        self._codec.encode(total, answer[:length], lost[1][own] if lost else None)
        mean = torch.empty_like(apart)
        for row, piece, length in zip(self._wire.gather(answer), self._pieces, self._lengths, strict=True):
            self._codec.decode(row[:length], mean[piece])
        return mean

    def _rows(self, count: int) -> Tensor:
        # They begin at multiples of 8 bytes, as codecs want it.
        return torch.zeros(count, -(-max(self._lengths) // 8) * 8, dtype=torch.uint8, device=self._device)
