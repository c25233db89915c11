"""Files as examples: whole, by line, and by record (TFRecord and ArrayRecord), on any file system that fsspec knows.

TFRecord has no index: one scan of the lengths finds where the records are.

    length (8 bytes) | its checksum (4) | content (length) | its checksum (4)      little endian, one after the other

Its checksums are CRC-32C, rotated by 15 bits plus a constant (TensorFlow's core/lib/io/record_writer.h). ArrayRecord
(github.com/google/array_record) has an index, and its library reads many records at once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch
from headrace.data.sources.storage import OPEN, BoundedCache, FileSource, SourceFile, Window, find_files, map_files
from headrace.errors import DataError, UsageError
from headrace.machine.extras import import_package

_CHUNK = 1 << 24
_NEWLINE = ord("\n")


def from_files(
    where: str | Sequence[str], *, label: Callable[[str], Any] | None = None, **options: Any
) -> InputPipeline:
    """Returns a pipeline over whole files.

    An example is a file's content as bytes; with `label` it is a tuple `(content, label)`.

    Args:
        where: a pattern, "photos/**/*.jpg" or "s3://bucket/photos/*.jpg", or several; files come in the order of their
            names.
        label: takes a file's name and returns its label.
        options: of the file system, as fsspec takes them (`anon=True`, `endpoint_url=...`).

    Raises:
        DataError: no file is found.
        UsageError: `label` is no function.
        UnfitMachine: a package that the file system needs is not installed.

    Examples:
        >>> from pathlib import Path
        >>> for name in ("cat.1.jpg", "dog.1.jpg"):
        ...     _ = Path(name).write_bytes(b"...")
        >>> pipeline = hr.data.from_files("*.jpg", label=lambda path: int("dog" in path))
        >>> len(pipeline)
        2
    """
    if label is not None and not callable(label):
        raise UsageError(f"label must be a function of a file's name, got {label!r:.60}")
    return InputPipeline(_WholeFiles("files", find_files(where, options), partial(_content, label=label)))


def from_text(where: str | Sequence[str], by: str = "line", **options: Any) -> InputPipeline:
    """Returns a pipeline over lines of text, or whole texts, in UTF-8.

    An example is a str: a line without its line ending, or a file. Empty lines are examples, too.

    Args:
        where: a pattern, "books/*.txt" or "https://host/book.txt", or several.
        by: "line", or "file" for the whole of each; to find the lines, files are read once when the pipeline is made.
        options: of the file system, as fsspec takes them.

    Raises:
        DataError: no file is found, or one cannot be read.
        UsageError: `by` is neither.
        UnfitMachine: a package that the file system needs is not installed.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("poem.txt").write_text("one\\ntwo\\n")
        >>> hr.data.from_text("poem.txt").source.example(1, hr.data.Epoch(0, 0))
        'two'
    """
    if by not in ("line", "file"):
        raise UsageError(f"by must be 'line' or 'file', got {by!r}")
    files = find_files(where, options)
    if by == "line":
        return InputPipeline(_Lines("lines", files, map_files(_scan_lines, files)))
    return InputPipeline(_WholeFiles("texts", files, _text))


class _RecordSource(FileSource):
    """One byte range an example; `places` has for each file where the records begin and, last, where they end."""

    def __init__(self, kind: str, files: Sequence[SourceFile], places: Sequence[NDArray[np.int64]]) -> None:
        super().__init__(kind, files, [len(begins) - 1 for begins in places])
        self._places = tuple(places)

    def nbytes(self, index: int) -> int | None:
        _, _, start, stop = self._locate(index)
        return stop - start

    def _locate(self, index: int) -> tuple[int, int, int, int]:
        """Returns the file, the number of the record in it, and its range of bytes."""
        at, record = self._spans.find(index)
        start, stop = self._places[at][record : record + 2].tolist()
        return at, record, start, stop


class _WholeFiles(FileSource):
    """One example a file, read by `read(file)`."""

    def __init__(self, kind: str, files: Sequence[SourceFile], read: Callable[[SourceFile], Any]) -> None:
        super().__init__(kind, files, [1] * len(files))
        self._read = read

    def example(self, index: int, epoch: Epoch) -> Any:
        return self._read(self._files[index])

    def key(self, index: int) -> str:
        return self._files[index].name

    def nbytes(self, index: int) -> int | None:
        return self._files[index].size


class _Lines(_RecordSource):
    def example(self, index: int, epoch: Epoch) -> Any:
        at, _, start, stop = self._locate(index)
        content = self._files[at].read(start, stop - start).removesuffix(b"\n").removesuffix(b"\r")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise _undecodable(self.key(index), error) from error

    def key(self, index: int) -> str:
        at, line, _, _ = self._locate(index)
        return f"{self._files[at].name}, line {line + 1}"


def _scan_lines(file: SourceFile) -> NDArray[np.int64]:
    """Returns where each line begins and, last, where the file ends; `(lines + 1,)`."""
    begins = [np.zeros(1, dtype=np.int64)]
    for start in range(0, file.length, _CHUNK):
        content = np.frombuffer(file.read(start, min(_CHUNK, file.length - start)), dtype=np.uint8)
        begins.append(np.flatnonzero(content == _NEWLINE) + (start + 1))
    ends = np.concatenate(begins)
    return ends if ends[-1] == file.length else np.append(ends, file.length)


def _content(file: SourceFile, label: Callable[[str], Any] | None) -> Any:
    content = file.read()
    return content if label is None else (content, label(file.name))


def _text(file: SourceFile) -> str:
    content = file.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _undecodable(f"{file.name}, line {line}", error) from error


def _undecodable(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start:,} ({error.reason}); convert the "
        "file (iconv -t utf-8), or on_error('skip')"
    )


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

    Examples:
        >>> records = hr.data.from_tfrecord("train-*.tfrecord")
        >>> len(records), type(records.source.example(0, hr.data.Epoch(0, 0)))
        (2, <class 'bytes'>)
    """
    files = find_files(where, options)
    return InputPipeline(_Records("tfrecord", files, map_files(_scan_records, files)))


def _scan_records(file: SourceFile) -> NDArray[np.int64]:
    """Returns where each record's content begins and, last, where another one would; `(records + 1,)`."""
    window, place = Window(file), 0
    starts: list[int] = []
    while place < file.length:
        head = window.at(place, _HEAD.size)
        if len(head) < _HEAD.size:
            raise _truncated(file, len(starts), place, _HEAD.size)
        length, check = _HEAD.unpack(head)
        if _checksum(head[:8]) != check:
            packed = "; it is compressed, so unpack it" if head[:2] == b"\x1f\x8b" and not starts else ""
            raise DataError(
                f"{file.name}: the length of record {len(starts)}, at byte {place:,}, has a wrong checksum, so the "
                f"file is damaged or no TFRecord file{packed}"
            )
        starts.append(place + _HEAD.size)
        if place + _HEAD.size + length + _FOOT.size > file.length:
            raise _truncated(file, len(starts) - 1, place, _HEAD.size + length + _FOOT.size)
        place += _HEAD.size + length + _FOOT.size
    return np.array([*starts, place + _HEAD.size], dtype=np.int64)


def _truncated(file: SourceFile, record: int, place: int, wanted: int) -> DataError:
    return DataError(
        f"{file.name} is truncated: record {record} begins at byte {place:,} and takes {wanted:,}, but the file ends "
        f"at byte {file.length:,}; write it again"
    )


def _checksum(content: bytes) -> int:
    plain: int = import_package("google_crc32c", "TFRecord needs google-crc32c").value(content)
    return ((plain >> 15 | plain << 17) + _MASK) & 0xFFFFFFFF


class _Records(_RecordSource):
    def example(self, index: int, epoch: Epoch) -> Any:
        at, _, start, _ = self._locate(index)
        length = self.nbytes(index)
        content = self._files[at].read(start, length + _FOOT.size)
        if _checksum(content[:length]) != _FOOT.unpack_from(content, length)[0]:
            raise DataError(
                f"{self.key(index)} has a wrong checksum: its {length:,} bytes are not what was written"
            ).with_remedy("write the file again, or on_error('skip')")
        return content[:length]

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

    Examples:
        >>> from array_record.python.array_record_module import ArrayRecordWriter
        >>> writer = ArrayRecordWriter("train-0.array_record", "group_size:1")
        >>> for record in (b"first", b"second"):
        ...     writer.write(record)
        >>> writer.close()
        >>> hr.data.from_array_record("train-*.array_record").source.example(1, hr.data.Epoch(0, 0))
        b'second'
    """
    patterns = [where] if isinstance(where, str) else list(where)
    remote = [pattern for pattern in patterns if "://" in pattern]
    if remote:
        raise UsageError(f"ArrayRecord is read from this machine's files, got {remote[0]!r}; copy them here")
    return InputPipeline(_ArrayRecords(find_files(patterns, {})))


class _ArrayRecords(FileSource):
    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = tuple(files)
        self._readers: BoundedCache[Any] = BoundedCache(OPEN)
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

    def _read(self, at: int, records: list[int]) -> list[bytes]:
        file = self._files[at]
        try:
            contents: list[bytes] = self._reader(at).read(records)
            # From a file that was truncated meanwhile, it returns empty records.
            file.require(os.stat(file.name).st_size)
        except (OSError, RuntimeError) as error:
            which = f"record {records[0]}" if len(records) == 1 else f"one of the records {records}"
            raise DataError(
                f"of {file.name}, {which} cannot be read: {error}; write the file again, or on_error('skip')"
            ) from error
        return contents

    def _reader(self, at: int) -> Any:
        # A fork does not have the threads that its parent's reader may have started.
        return self._readers.get((os.getpid(), at), lambda: self._opened(self._files[at]))

    def _opened(self, file: SourceFile) -> Any:
        package = import_package("array_record.python.array_record_module", "ArrayRecord needs array-record")
        try:
            reader = package.ArrayRecordReader(file.name, _OPTIONS)
        except RuntimeError as error:
            raise DataError(f"{file.name} cannot be opened as ArrayRecord: {error}") from error
        if not reader.ok():
            raise DataError(
                f"{file.name} ({file.length:,} bytes) is not a whole ArrayRecord file: it is truncated, damaged or of "
                "another format; write it again"
            )
        return reader
