"""A sum of gradients that each worker has encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.aggregation.gradients import GradientAggregation, WorkerGroup
from headrace.transport.codec import CODECS, codec_for, sent_share


@dataclass(frozen=True)
class CodedSum(GradientAggregation):
    """Sends each parameter's gradient by a codec, with error feedback if the codec asks for it.

    Attributes:
        codec: its name.
    """

    codec: str

    own_state = ("residual",)

    def aggregate(
        self, gradients: Sequence[Tensor], state: Sequence[dict[str, Tensor]], workers: WorkerGroup
    ) -> Sequence[Tensor]:
        sent = []
        for gradient, kept in zip(gradients, state, strict=True):
            codec = codec_for(self.codec, gradient.dtype)
            out = torch.empty(codec.nbytes(gradient.numel(), gradient.dtype), dtype=torch.uint8, device=gradient.device)
            codec.encode(gradient, out, kept["residual"] if codec.feedback else None)
            sent.append(out)
        totals = [torch.zeros_like(each) for each in gradients]
        for theirs in workers.gather(sent):
            for total, data in zip(totals, theirs, strict=True):
                decoded = torch.empty_like(total)
                codec_for(self.codec, total.dtype).decode(data, decoded)
                total.add_(decoded)
        return totals

    def traffic(self, workers: int) -> float:
        return sent_share(self.codec) * workers / 2


def is_codec(name: str) -> bool:
    """Returns whether a codec has this name, of this package or of another."""
    return name in CODECS.places or name in CODECS.added
