"""Temporary folders that are deleted at the end of their use, also where SIGTERM ends this process before."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folders: set[Path] = set()


@contextmanager
def temporary_folder(prefix: str = "headrace-", within: Path | None = None) -> Iterator[Path]:
    """Makes a folder, `within` another or where the system has such folders, and deletes it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as name:
        folder = Path(name)
        delete_with_process(folder)
        try:
            yield folder
        finally:
            forget(folder)


def delete_with_process(folder: Path) -> None:
    """Lets `delete_all` delete a folder, too."""
    _folders.add(folder)


def forget(folder: Path) -> None:
    """Takes that back, when the folder is deleted."""
    _folders.discard(folder)


def delete_all() -> None:
    """Deletes all these folders, for a process that ends at once."""
    for folder in tuple(_folders):
        shutil.rmtree(folder, ignore_errors=True)
