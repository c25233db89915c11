"""A pipeline by hand, without a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.data.loading.loader import Loader
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.errors import UsageError


def batches(pipeline: InputPipeline, *, epoch: int = 0, seed: int = 0, start: int = 0) -> Iterator[Any]:
    """Yields the batches of one epoch, as a job with one worker would have them.

        for images, labels in hr.data.batches(pipeline.shuffle().batch(32), epoch=3):

    Args:
        pipeline: with a batch size, `.batch(32)`.
        epoch: counted from 0; each has its own order and augmentation.
        seed: what both follow, if the pipeline has no seed of its own.
        start: batches to leave out, where an earlier iteration ended.

    Raises:
        UsageError: the pipeline has no batch size.
        DataError: an example cannot be had.
    """
    size = pipeline.batching.size
    if size is None:
        raise UsageError("nobody says how many examples a batch has; chain .batch(32) behind the pipeline")
    loader = Loader(pipeline, seed, size, (1,), 0)
    first = epoch * loader.rounds_per_epoch
    shares = loader.rounds(first + start, first + loader.rounds_per_epoch)
    try:
        for share in shares:
            yield share.batch
    finally:
        shares.close()
