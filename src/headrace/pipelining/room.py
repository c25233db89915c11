"""What to say where memory runs out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headrace.errors import UnfitMachine

__all__ = ["out_of_memory", "room"]


@contextmanager
def room(where: str, held: Callable[[], str], remedy: str) -> Iterator[None]:
    """Says what there was, where something runs out of memory.

    Args:
        where: "stage 1 ran out of memory in ...".
        held: what took it, when it is asked for.
        remedy: what to do about it.

    Raises:
        UnfitMachine: so it did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        raise UnfitMachine(
            f"{where}, when the process held {resident:,} bytes, {held()}: {str(error) or 'no more memory'}; {remedy}"
        ) from error


def out_of_memory(error: Exception) -> bool:
    """Returns whether that is what it says."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
