"""ArrayRecord: records by number, read many at once (github.com/google/array_record)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch, Source
from headrace.data.sources.kept import BoundedCache
from headrace.data.sources.spans import Spans
from headrace.data.sources.storage import OPEN, SourceFile, find, identity_of
from headrace.errors import DataError, UnfitMachine, UsageError

_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
"""What its documentation says for random access; besides, it then starts no thread that a fork would lose."""


def from_array_record(where: str | Sequence[str]) -> InputPipeline:
    """Returns a pipeline over the records of ArrayRecord files on this machine.

    An example is a record's content as bytes.

    Args:
        where: a pattern, "train-*.array_record", or several.

    Raises:
        DataError: no file is found, or one is no ArrayRecord.
        UsageError: the files lie elsewhere.
        UnfitMachine: array-record is not installed.
    """
    patterns = [where] if isinstance(where, str) else list(where)
    remote = [pattern for pattern in patterns if "://" in pattern]
    if remote:
        raise UsageError(f"ArrayRecord is read from this machine's files, got {remote[0]!r}; copy them here")
    return InputPipeline(_ArrayRecords(find(patterns, {})))


class _ArrayRecords(Source):
    """Every process opens the files for itself.

    Args:
        files: in turn.

    Raises:
        DataError: one is no ArrayRecord.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = tuple(files)
        self._readers: BoundedCache[Any] = BoundedCache(OPEN, _one)
        self._spans = Spans(self._reader(at).num_records() for at in range(len(files)))

    def __len__(self) -> int:
        return len(self._spans)

    def example(self, index: int, epoch: Epoch) -> Any:
        at, record = self._spans.find(index)
        return self._read(at, [record])[0]

    @property
    def identity(self) -> str:
        return identity_of("array_record", self._files)

    @property
    def gathers(self) -> bool:
        return True

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        wanted = indices.numpy()
        begins = np.array(self._spans.begins)
        which = np.searchsorted(begins, wanted, side="right") - 1
        examples: list[Any] = [None] * len(wanted)
        for at in np.unique(which).tolist():
            places = np.flatnonzero(which == at)
            records = self._read(at, (wanted[places] - begins[at]).tolist())
            for place, record in zip(places.tolist(), records, strict=True):
                examples[place] = record
        return self.collate(examples) if examples else examples

    def key(self, index: int) -> str:
        at, record = self._spans.find(index)
        return f"{self._files[at].name}, record {record}"

    def _read(self, at: int, records: list[int]) -> list[bytes]:
        file = self._files[at]
        try:
            found: list[bytes] = self._reader(at).read(records)
            # Of a file that was cut meanwhile, it returns records that are empty.
            file.require(os.stat(file.name).st_size)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"of {file.name}, {_named(records)} cannot be read: {error}; write the file again, or on_error('skip')"
            ) from error
        return found

    def _reader(self, at: int) -> Any:
        # A fork has not got the threads that a reader of its parent may have started.
        return self._readers.get((os.getpid(), at), lambda: self._opened(self._files[at]))

    def _opened(self, file: SourceFile) -> Any:
        try:
            from array_record.python.array_record_module import ArrayRecordReader
        except ImportError as error:
            raise UnfitMachine(f'ArrayRecord needs array-record ({error}); pip install "headrace[data]"') from error
        try:
            reader = ArrayRecordReader(file.name, _OPTIONS)
        except RuntimeError as error:
            raise DataError(f"{file.name} cannot be opened as ArrayRecord: {error}") from error
        if not reader.ok():
            raise DataError(
                f"{file.name} ({file.length:,} bytes) is no whole ArrayRecord file: it is truncated, damaged or of "
                "another format; write it again"
            )
        return reader


def _one(reader: Any) -> int:
    return 1


def _named(records: Sequence[int]) -> str:
    return f"record {records[0]}" if len(records) == 1 else f"one of the records {records}"
