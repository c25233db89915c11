"""TFRecord and ArrayRecord files: records as examples.

TFRecord has no index: one scan of the lengths finds where the records are.

    length (8 bytes) | its checksum (4) | content (length) | its checksum (4)      little endian, one after the other

Its checksums are CRC-32C, rotated by 15 bits plus a constant (TensorFlow's core/lib/io/record_writer.h). ArrayRecord
(github.com/google/array_record) has an index, and its library reads many records at once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch
from headrace.data.sources.pieces import BoundedCache
from headrace.data.sources.storage import OPEN, FileSource, RecordSource, SourceFile, Window, find_files, map_files
from headrace.errors import DataError, UnfitMachine, UsageError

_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_MASK = 0xA282EAD8


def from_tfrecord(where: str | Sequence[str], **options: Any) -> InputPipeline:
    """Returns a pipeline over the records of TFRecord files that are not compressed.

    An example is a record's content as bytes; `.map(hr.data.ParseExample(...))` reads those of `tf.train.Example`.

    All lengths are read when the pipeline is made, to know where each record is; contents are read, and checked, when
    they are asked for.

    Args:
        where: a pattern, "train-*.tfrecord" or "gs://bucket/train-*", or several.
        options: of the file system, as fsspec takes them.

    Raises:
        DataError: no file is found, or one is truncated or damaged.
        UnfitMachine: google-crc32c is not installed, or what that file system needs.
    """
    files = find_files(where, options)
    return InputPipeline(_Records("tfrecord", files, map_files(_scan, files)))


def _scan(file: SourceFile) -> NDArray[np.int64]:
    """Returns where each record's content begins and, last, where another one would; `(records + 1,)`."""
    window, place = Window(file), 0
    found: list[int] = []
    while place < file.length:
        head = window.at(place, _HEAD.size)
        if len(head) < _HEAD.size:
            raise _truncated(file, len(found), place, _HEAD.size)
        length, check = _HEAD.unpack(head)
        if _checksum(head[:8]) != check:
            packed = "; it is compressed, so unpack it" if head[:2] == b"\x1f\x8b" and not found else ""
            raise DataError(
                f"{file.name}: the length of record {len(found)}, at byte {place:,}, has a wrong checksum, so the file "
                f"is damaged or no TFRecord file{packed}"
            )
        found.append(place + _HEAD.size)
        if place + _HEAD.size + length + _FOOT.size > file.length:
            raise _truncated(file, len(found) - 1, place, _HEAD.size + length + _FOOT.size)
        place += _HEAD.size + length + _FOOT.size
    return np.array([*found, place + _HEAD.size], dtype=np.int64)


def _truncated(file: SourceFile, record: int, place: int, wanted: int) -> DataError:
    return DataError(
        f"{file.name} is truncated: record {record} begins at byte {place:,} and takes {wanted:,}, but the file ends "
        f"at byte {file.length:,}; write it again"
    )


def _checksum(content: bytes) -> int:
    try:
        from google_crc32c import value
    except ImportError as error:
        raise UnfitMachine(f'TFRecord needs google-crc32c ({error}); pip install "headrace[data]"') from error
    plain: int = value(content)
    return ((plain >> 15 | plain << 17) + _MASK) & 0xFFFFFFFF


class _Records(RecordSource):
    def example(self, index: int, epoch: Epoch) -> Any:
        at, _, start, _ = self._locate(index)
        length = self.nbytes(index)
        content = self._files[at].read(start, length + _FOOT.size)
        if _checksum(content[:length]) != _FOOT.unpack_from(content, length)[0]:
            raise DataError(
                f"{self.key(index)} has a wrong checksum: its {length:,} bytes are not what was written; write the "
                "file again, or on_error('skip')"
            )
        return content[:length]

    def key(self, index: int) -> str:
        at, record, _, _ = self._locate(index)
        return f"{self._files[at].name}, record {record}"

    def nbytes(self, index: int) -> int:
        _, _, start, following = self._locate(index)
        return following - start - _HEAD.size - _FOOT.size


_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
"""For random access, as ArrayRecord's documentation says; else it would start threads that a fork loses."""


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
    return InputPipeline(_ArrayRecords(find_files(patterns, {})))


class _ArrayRecords(FileSource):
    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = tuple(files)
        self._readers: BoundedCache[Any] = BoundedCache(OPEN, _one)
        super().__init__("array_record", files, [self._reader(at).num_records() for at in range(len(files))])

    def example(self, index: int, epoch: Epoch) -> Any:
        at, record = self._spans.find(index)
        return self._read(at, [record])[0]

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
            # From a file that was truncated meanwhile, it returns empty records.
            file.require(os.stat(file.name).st_size)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"of {file.name}, {_named(records)} cannot be read: {error}; write the file again, or on_error('skip')"
            ) from error
        return found

    def _reader(self, at: int) -> Any:
        # A fork does not have the threads that its parent's reader may have started.
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
                f"{file.name} ({file.length:,} bytes) is not a whole ArrayRecord file: it is truncated, damaged or of "
                "another format; write it again"
            )
        return reader


def _one(reader: Any) -> int:
    return 1


def _named(records: Sequence[int]) -> str:
    return f"record {records[0]}" if len(records) == 1 else f"one of the records {records}"
