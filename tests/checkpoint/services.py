"""File systems elsewhere: one in this process's memory, and one that fails when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from headrace.checkpoint.folder import folder_name

__all__ = ["Breakable", "files_at", "local_files", "spoil"]


class Breakable:
    """Breaks all operations of fsspec's memory file system, or those from the n-th on; counts them.

    Args:
        patch: repairs it at the end of the test.
    """

    OPERATIONS = ("open", "ls", "info", "rm", "rm_file", "exists")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: float = float("inf")
        self.done = 0
        for name in self.OPERATIONS:
            patch.setattr(MemoryFileSystem, name, self._breakable(getattr(MemoryFileSystem, name)))

    def _breakable(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **named: Any) -> Any:
            if self.left <= 0:
                raise ConnectionError("the service is down")
            self.left -= 1
            self.done += 1
            return operation(*arguments, **named)

        return act


def files_at(url: str) -> dict[str, bytes]:
    """Returns the content of every file there, by its path below the URL."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return {path.removeprefix(f"{root}/"): system.cat_file(path) for path in system.find(root)}


def spoil(url: str, step: int, how: str) -> None:
    """Damages the copy of a checkpoint: "half" loses its manifest, "gone" a file, "short" its end, "bit" one bit."""
    system, root = fsspec.core.url_to_fs(url)
    folder = f"{root}/{folder_name(step)}"
    file, listed = f"{folder}/rank-0.safetensors", f"{folder}/manifest.json"
    content = system.cat_file(file)
    match how:
        case "half":
            system.rm_file(listed)
        case "gone":
            system.rm_file(file)
        case "short":
            system.pipe_file(file, content[:-1])
        case "bit":
            system.pipe_file(file, content[:-1] + bytes([content[-1] ^ 1]))
        case "other":
            system.pipe_file(listed, system.cat_file(listed).replace(b'"step":', b'"step": '))
        case "exchanged":
            other = next(each for each in system.ls(root, detail=False) if not each.endswith(folder_name(step)))
            system.pipe_file(listed, system.cat_file(f"{other}/manifest.json"))


def local_files(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file of a folder, by its path below it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
