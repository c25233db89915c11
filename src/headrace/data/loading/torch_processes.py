"""Reading by the processes of a torch `DataLoader`."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from headrace.data.loading.reader import ExampleReader, Part, ReadResult
from headrace.data.pipeline.pipeline import Processes
from headrace.errors import DataError


def read_by_torch(
    reader: ExampleReader, processes: Processes, parts: Iterator[Part], seed: int
) -> Generator[tuple[Part, ReadResult], None, None]:
    """Yields each part (epoch, indices, length of the global batch) with its batch, read by a `DataLoader`'s processes.

    `seed` seeds the processes' own random numbers. Of an unreadable example, the process's traceback is a note.
    """
    parts, theirs = tee(parts)
    batches = iter(_loader(reader, processes, theirs, seed))
    try:
        for part in parts:
            epoch, indices, _ = part
            read = next(batches) if len(indices) else reader.read(epoch, indices)
            if isinstance(read, _Broken):
                error = DataError(read.message)
                error.add_note(read.traceback)
                raise error
            yield part, read
    finally:
        # Its processes end with the last reference, which a traceback with this frame must not keep.
        del batches


def _loader(reader: ExampleReader, processes: Processes, parts: Iterable[Part], seed: int) -> DataLoader[Any]:
    return DataLoader(
        _Reading(reader),
        batch_size=None,
        # As arrays, since each tensor would be sent through a file of its own.
        sampler=((epoch, indices.numpy()) for epoch, indices, _ in parts if len(indices)),
        collate_fn=_identity,
        num_workers=processes.count,
        **processes.options,
        # Seeds its processes without drawing from the generator that dropout uses.
        generator=torch.Generator().manual_seed(seed % 2**63),
    )


@dataclass(frozen=True)
class _Broken:
    """An error that a reading process sends in place of a batch."""

    message: str
    traceback: str


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


def _identity(batch: Any) -> Any:
    return batch
