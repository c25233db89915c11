"""From host memory to a CUDA device, while the device computes.

copy   | batch 0 | batch 1 | batch 2 |
device           | step 0  | step 1  | step 2
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from headrace.spec.job import Share
from headrace.trees import map_tensors


def delivered(shares: Generator[Share, None, None], device: torch.device) -> Generator[Share, None, None]:
    """Yields shares whose batches lie on a device, in order.

    Each is pinned, and copied on a stream of its own while the one before is trained on. On any other device than a
    CUDA one they stay where they are.

    Args:
        shares: closed with this.
        device: that of the model.
    """
    if device.type != "cuda":
        return shares
    return _double_buffered(shares, device)


def _double_buffered(shares: Generator[Share, None, None], device: torch.device) -> Generator[Share, None, None]:
    stream = torch.cuda.Stream(device)

    def bring() -> tuple[Share, torch.cuda.Event] | None:
        share = next(shares, None)
        if share is None:
            return None
        with torch.cuda.stream(stream):
            batch = map_tensors(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), share.batch)
            return replace(share, batch=batch), stream.record_event()

    def take_over(tensor: Tensor) -> Tensor:
        # Its memory belongs to the stream that copied; the one that computes may use it longer.
        tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    try:
        upcoming = bring()
        while upcoming is not None:
            share, arrived = upcoming
            upcoming = bring()
            torch.cuda.current_stream(device).wait_event(arrived)
            yield replace(share, batch=map_tensors(take_over, share.batch))
    finally:
        shares.close()
