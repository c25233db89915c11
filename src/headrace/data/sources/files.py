"""Whole files as examples, on any file system that fsspec knows."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from typing import Any

from headrace.data.pipeline import Pipeline
from headrace.data.source import Epoch, Source
from headrace.errors import DataError, UnfitMachine

__all__ = ["from_files"]


def from_files(where: str | Sequence[str], *, label: Callable[[str], Any] | None = None, **options: Any) -> Pipeline:
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
    patterns = [where] if isinstance(where, str) else list(where)
    found: list[tuple[str, int]] = []
    system: Any = None
    for pattern in patterns:
        if "://" in pattern:
            system, files = _remote(pattern, options)
        else:
            names = glob.glob(os.path.expanduser(pattern), recursive=True)
            files = [(name, os.stat(name).st_size) for name in names if os.path.isfile(name)]
        if not files:
            raise DataError(f"no file is found by {pattern!r} (from {os.getcwd()}); give another pattern")
        found += sorted(files)
    return Pipeline(_Files(found, system, label))


def _remote(pattern: str, options: dict[str, Any]) -> tuple[Any, list[tuple[str, int]]]:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(pattern, **options)
    except (ImportError, ValueError) as error:
        raise UnfitMachine(f"{pattern.partition('://')[0]}:// cannot be read here: {error}") from error
    details = system.glob(path, detail=True)
    return system, [(name, int(each.get("size") or 0)) for name, each in details.items() if each["type"] == "file"]


class _Files(Source):
    """Args:
    files: name and size of each.
    system: of fsspec; None for the operating system's.
    label: see `from_files`.
    """

    def __init__(self, files: Sequence[tuple[str, int]], system: Any, label: Callable[[str], Any] | None) -> None:
        self._files = tuple(files)
        self._system = system
        self._label = label

    def __len__(self) -> int:
        return len(self._files)

    def example(self, index: int, epoch: Epoch) -> Any:
        name, size = self._files[index]
        content = self._read(name, size)
        return content if self._label is None else (content, self._label(name))

    @property
    def identity(self) -> str:
        return f"files {[(name, size) for name, size in self._files]}"

    def key(self, index: int) -> str:
        return self._files[index][0]

    def nbytes(self, index: int) -> int | None:
        return self._files[index][1]

    def _read(self, name: str, size: int) -> bytes:
        try:
            if self._system is not None:
                content: bytes = self._system.cat_file(name)
            else:
                descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    content = os.read(descriptor, size + 1)
                    while len(content) < size and (more := os.read(descriptor, size + 1 - len(content))):
                        content += more
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror or error}") from error
        if len(content) != size and size:
            raise DataError(
                f"{name} had {size:,} bytes when the run began and has {len(content):,} now; "
                "give back what it was, or on_error('skip')"
            )
        return content
