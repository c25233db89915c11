"""Brings batches to a CUDA device while the one before is computed."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.devices import kind_of, runtime_of, use
from headrace.spec.job import Share
from headrace.trees import map_tensors, nbytes

_LARGE = 1 << 20
"""Bytes of a batch from which on it is pinned by another thread; handing a smaller one over takes longer."""


def delivered(shares: Generator[Share, None, None], device: torch.device) -> Generator[Share, None, None]:
    """Yields shares whose batches lie on a device, in order.

    Each batch is pinned by a thread beside training, and copied on a stream of its own while training computes the one
    before:

        pin      | batch 0 | batch 1 | batch 2 | batch 3 |
        copy               | batch 0 | batch 1 | batch 2 |
        compute                      | step 0  | step 1  | step 2

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

    # Its thread begins with the first batch that is worth it.
    pinning = ThreadPoolExecutor(1, "headrace-pin", use, (str(device),))

    def read() -> tuple[Share, Future[Any]] | None:
        if (share := next(shares, None)) is None:
            return None
        if nbytes(share.batch) >= _LARGE:
            return share, pinning.submit(_pinned, share.batch)
        pinned: Future[Any] = Future()
        pinned.set_result(_pinned(share.batch))
        return share, pinned

    def copy(known: tuple[Share, Future[Any]] | None) -> tuple[Share, Any] | None:
        if known is None:
            return None
        share, pinned = known
        with runtime.stream(stream):
            batch = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), pinned.result())
            return replace(share, batch=batch), stream.record_event()

    def adopt(tensor: Tensor) -> Tensor:
        # The memory belongs to the copying stream; the computing stream may use it longer.
        tensor.record_stream(runtime.current_stream(device))
        return tensor

    try:
        upcoming = copy(read())
        following = read() if upcoming else None
        while upcoming is not None:
            share, arrived = upcoming
            # Pinned before the next one is read, since readers may use its memory again.
            upcoming = copy(following)
            following = read() if upcoming else None
            runtime.current_stream(device).wait_event(arrived)
            yield replace(share, batch=map_tensors(adopt, share.batch))
    finally:
        pinning.shutdown()
        shares.close()


def _pinned(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.pin_memory(), batch)
