"""Whole files as examples, on any file system that fsspec knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch, Source
from headrace.data.sources.pieces import Spans
from headrace.data.sources.storage import SourceFile, each, find, identity_of
from headrace.errors import DataError, UsageError


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
        UnfitMachine: what that file system needs is not installed.
    """
    return InputPipeline(_Files(find(where, options), label))


class _Files(Source):
    """Args:
    files: one for each example.
    label: see `from_files`.
    """

    def __init__(self, files: Sequence[SourceFile], label: Callable[[str], Any] | None) -> None:
        self._files = tuple(files)
        self._label = label

    def __len__(self) -> int:
        return len(self._files)

    def example(self, index: int, epoch: Epoch) -> Any:
        file = self._files[index]
        content = file.read()
        return content if self._label is None else (content, self._label(file.name))

    @property
    def identity(self) -> str:
        return identity_of("files", self._files)

    def key(self, index: int) -> str:
        return self._files[index].name

    def nbytes(self, index: int) -> int | None:
        return self._files[index].size


_CHUNK = 1 << 24
_NEWLINE = ord("\n")


def from_text(where: str | Sequence[str], by: str = "line", **options: Any) -> InputPipeline:
    """Returns a pipeline over lines of text, or whole texts, in UTF-8.

    An example is a str, a line without what ends it. Lines that are empty are examples, too.

    Args:
        where: a pattern, "books/*.txt" or "https://host/book.txt", or several.
        by: "line", or "file" for the whole of each; files are read once to find the lines when the pipeline is made.
        options: of the file system, as fsspec takes them.

    Raises:
        DataError: no file is found, or one cannot be read.
        UsageError: `by` is neither.
        UnfitMachine: what that file system needs is not installed.
    """
    if by not in ("line", "file"):
        raise UsageError(f"by must be 'line' or 'file', got {by!r}")
    files = find(where, options)
    return InputPipeline(_Lines(files, each(_scan, files)) if by == "line" else _Texts(files))


def _scan(file: SourceFile) -> NDArray[np.int64]:
    """Returns where each line begins, and, last, where the file ends; `(lines + 1,)`."""
    begins = [np.zeros(1, dtype=np.int64)]
    for start in range(0, file.length, _CHUNK):
        content = np.frombuffer(file.read(start, min(_CHUNK, file.length - start)), dtype=np.uint8)
        begins.append(np.flatnonzero(content == _NEWLINE) + (start + 1))
    found = np.concatenate(begins)
    return found if found[-1] == file.length else np.append(found, file.length)


class _Lines(Source):
    """Args:
    files: in turn.
    places: see `_scan`; of each.
    """

    def __init__(self, files: Sequence[SourceFile], places: Sequence[NDArray[np.int64]]) -> None:
        self._files = tuple(files)
        self._places = tuple(places)
        self._spans = Spans(len(each) - 1 for each in places)

    def __len__(self) -> int:
        return len(self._spans)

    def example(self, index: int, epoch: Epoch) -> Any:
        at, line = self._spans.find(index)
        start, stop = self._places[at][line : line + 2].tolist()
        content = self._files[at].read(start, stop - start)
        try:
            return content.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise _undecodable(self.key(index), error) from error

    @property
    def identity(self) -> str:
        return identity_of("lines", self._files)

    def key(self, index: int) -> str:
        at, line = self._spans.find(index)
        return f"{self._files[at].name}, line {line + 1}"

    def nbytes(self, index: int) -> int | None:
        at, line = self._spans.find(index)
        start, stop = self._places[at][line : line + 2].tolist()
        return int(stop - start)


class _Texts(Source):
    """Args:
    files: one for each example.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = tuple(files)

    def __len__(self) -> int:
        return len(self._files)

    def example(self, index: int, epoch: Epoch) -> Any:
        file = self._files[index]
        content = file.read()
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise _undecodable(f"{file.name}, line {line}", error) from error

    @property
    def identity(self) -> str:
        return identity_of("texts", self._files)

    def key(self, index: int) -> str:
        return self._files[index].name

    def nbytes(self, index: int) -> int | None:
        return self._files[index].size


def _undecodable(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where} is no UTF-8: byte {error.object[error.start]:#04x} at {error.start:,} ({error.reason}); convert the "
        "file (iconv -t utf-8), or on_error('skip')"
    )
