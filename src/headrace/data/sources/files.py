"""Files as bytes or text, and lines of text, on any file system that fsspec knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch
from headrace.data.sources.storage import FileSource, RecordSource, SourceFile, find_files, map_files
from headrace.errors import DataError, UsageError

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
        UnfitMachine: a package that the file system needs is not installed.
    """
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
    """
    if by not in ("line", "file"):
        raise UsageError(f"by must be 'line' or 'file', got {by!r}")
    files = find_files(where, options)
    if by == "line":
        return InputPipeline(_Lines("lines", files, map_files(_scan, files)))
    return InputPipeline(_WholeFiles("texts", files, _text))


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


class _Lines(RecordSource):
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


def _scan(file: SourceFile) -> NDArray[np.int64]:
    """Returns where each line begins and, last, where the file ends; `(lines + 1,)`."""
    begins = [np.zeros(1, dtype=np.int64)]
    for start in range(0, file.length, _CHUNK):
        content = np.frombuffer(file.read(start, min(_CHUNK, file.length - start)), dtype=np.uint8)
        begins.append(np.flatnonzero(content == _NEWLINE) + (start + 1))
    found = np.concatenate(begins)
    return found if found[-1] == file.length else np.append(found, file.length)


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
