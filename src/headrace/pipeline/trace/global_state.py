"""What a forward may depend on beside its arguments: random numbers, autocast, torch's own functions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts something in the place of an attribute of a class or a module, for all threads of the process."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def autocast() -> list[bool]:
    """Returns whether autocast is on, by device."""
    return [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]


def rng_state() -> tuple[Any, ...]:
    """Returns the state of the random numbers of Python and of torch on the CPU."""
    # As bytes, since tensors that are equal are not equal in one word.
    return random.getstate(), torch.get_rng_state().numpy().tobytes()
