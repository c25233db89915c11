"""What to say where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headrace.errors import UnfitMachine
from headrace.memory import resident_bytes


@contextmanager
def explain_out_of_memory(where: str, held: Callable[[], str], remedy: str) -> Iterator[None]:
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
        resident = resident_bytes()
        raise UnfitMachine(
            f"{where}, when the process held {resident:,} bytes, {held()}: {str(error) or 'no more memory'}; {remedy}"
        ) from error


def out_of_memory(error: Exception) -> bool:
    """Returns whether that is what it says."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
