"""Whole files as examples, on any file system that fsspec knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch, Source
from headrace.data.sources.storage import SourceFile, find, identity_of


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
