"""Brings batches to a CUDA device while the one before is computed."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.devices import kind_of, runtime_of
from headrace.spec.job import Share
from headrace.trees import map_tensors


def delivered(shares: Generator[Share, None, None], device: torch.device) -> Generator[Share, None, None]:
    """Yields shares whose batches lie on a device, in order.

    Each batch is pinned and copied on a stream of its own while training computes the one before:

        copy     | batch 0 | batch 1 | batch 2 |
        compute            | step 0  | step 1  | step 2

    On a device without streams, by the device table, batches stay where they are.

    Examples:
        >>> loader = hr.data.Loader(hr.data.from_arrays(torch.arange(4)), 0, 2, shares=[1], data_rank=0)
        >>> [share.batch[0].tolist() for share in hr.data.delivered(loader.rounds(0, 2), torch.device("cpu"))]
        [[0, 1], [2, 3]]
    """
    return _double_buffered(shares, device) if kind_of(device.type).streams else shares


def _double_buffered(shares: Generator[Share, None, None], device: torch.device) -> Generator[Share, None, None]:
    runtime = runtime_of(device.type)
    stream = runtime.Stream(device)

    def copy_next() -> tuple[Share, Any] | None:
        if (share := next(shares, None)) is None:
            return None
        with runtime.stream(stream):
            batch = map_tensors(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), share.batch)
            return replace(share, batch=batch), stream.record_event()

    def adopt(tensor: Tensor) -> Tensor:
        # The memory belongs to the copying stream; the computing stream may use it longer.
        tensor.record_stream(runtime.current_stream(device))
        return tensor

    try:
        upcoming = copy_next()
        while upcoming is not None:
            share, arrived = upcoming
            upcoming = copy_next()
            runtime.current_stream(device).wait_event(arrived)
            yield replace(share, batch=map_tensors(adopt, share.batch))
    finally:
        shares.close()
