"""Batches that the processes of a torch `DataLoader` read, as whoever gave one told it to."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headrace.data.loading.reader import ExampleReader, ReadResult
from headrace.data.pipeline.pipeline import Processes
from headrace.errors import DataError

_Part = tuple[int, Tensor, int]


def read_by_torch(
    reader: ExampleReader, processes: Processes, parts: Iterator[_Part], seed: int
) -> Generator[tuple[_Part, ReadResult], None, None]:
    """Yields each part with what was read of it, in order.

    Args:
        reader: what each process does.
        processes: how many, and what they are told.
        parts: epoch, indices, length of the global batch.
        seed: of the processes' own random numbers.

    Raises:
        DataError: an example cannot be had; the process's traceback is a note.
    """
    mine, theirs = tee(parts)
    loader = DataLoader(
        _Reading(reader),
        batch_size=None,
        sampler=_wanted(theirs),
        collate_fn=_as_it_is,
        num_workers=processes.count,
        prefetch_factor=processes.prefetch_factor,
        multiprocessing_context=processes.start_method,
        worker_init_fn=processes.worker_init_fn,
        timeout=processes.timeout_s,
        # The base of its processes' seeds comes from here, not from the generator that dropout draws on.
        generator=torch.Generator().manual_seed(seed % 2**63),
    )
    batches = iter(loader)
    try:
        for part in mine:
            epoch, indices, _ = part
            read = next(batches) if len(indices) else reader.read(epoch, indices)
            if isinstance(read, _Broken):
                raise read.error()
            yield part, read
    finally:
        # Its processes end with the last reference; a traceback that holds this frame must not be one.
        del batches


@dataclass(frozen=True)
class _Broken:
    """What a reading process sends in place of a batch that it could not read."""

    message: str
    traceback: str

    def error(self) -> DataError:
        """Returns the error, with the traceback of the other process as a note."""
        error = DataError(self.message)
        error.add_note(self.traceback)
        return error


class _Reading(Dataset[Any]):
    """A data set of whole batches, for the processes of a `DataLoader`."""

    def __init__(self, reader: ExampleReader) -> None:
        self._reader = reader

    def __getitem__(self, part: Any) -> Any:
        epoch, indices = part
        try:
            return self._reader.read(epoch, torch.from_numpy(indices))
        except DataError as error:
            return _Broken(str(error), traceback.format_exc())


def _wanted(parts: Iterator[_Part]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for epoch, indices, _ in parts:
        if len(indices):
            # As an array, since tensors would cross to the other process through a file of their own each.
            yield epoch, indices.numpy()


def _as_it_is(batch: Any) -> Any:
    return batch
