"""Tensors that come with a snapshot, looked at before they are taken."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def like(tensors: Mapping[str, Tensor], name: str, known: Tensor) -> Tensor:
    """Returns the tensor of this name.

    Args:
        tensors: by name.
        name: which.
        known: what it must be like.

    Raises:
        ValueError: there is none, or it is of another shape or type.
    """
    found = tensors.get(name)
    if found is None or found.shape != known.shape or found.dtype != known.dtype:
        words = "missing" if found is None else f"{tuple(found.shape)} of {found.dtype}"
        raise ValueError(f"the tensor {name!r} is {words}, and {tuple(known.shape)} of {known.dtype} is needed")
    return found
