"""Is a batch of parts of its examples the parts of the batch? A collate function may pad, or combine examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.trees import UNSIGNED

PADS = "is padded to the longest of its examples"
COMBINES = "is not made of its examples one by one (it combines them, or draws random numbers)"


def differences(whole: Any, parts: Sequence[Any], name: str = "batch") -> Iterator[tuple[str, str]]:
    """Yields the names of what the batches of parts have otherwise than the whole one, each with what makes it so."""
    # Of broken examples alone.
    parts = [part for part in parts if part is not None]
    if whole is None or any(type(part) is not type(whole) for part in parts):
        if whole is not None:
            yield name, COMBINES
    elif isinstance(whole, Mapping):
        if any(part.keys() != whole.keys() for part in parts):
            yield name, COMBINES
            return
        for key, value in whole.items():
            yield from differences(value, [part[key] for part in parts], f"{name}[{key!r}]")
    elif isinstance(whole, list | tuple):
        if all(len(part) == len(whole) for part in parts):
            columns = zip(whole, zip(*parts, strict=True), strict=True)
        else:
            # One item for each example.
            columns = zip(whole, ((item,) for item in chain(*parts)), strict=False)
        for index, (value, others) in enumerate(columns):
            yield from differences(value, others, f"{name}[{index}]")
    elif isinstance(whole, Tensor | np.ndarray):
        if problem := _problem(_tensor(whole), list(map(_tensor, parts))):
            yield name, problem
    elif isinstance(whole, int | float | complex):
        if not all(part == whole for part in parts) and abs(sum(parts) - whole) > 1e-9 * abs(whole):
            yield name, COMBINES
    elif isinstance(getattr(whole, "__dict__", None), dict):
        yield from differences(vars(whole), list(map(vars, parts)), name)


def _tensor(value: Any) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    return tensor.to(torch.int64) if tensor.dtype in UNSIGNED else tensor


def _problem(whole: Tensor, parts: Sequence[Tensor]) -> str:
    """Returns what makes the parts others than the whole; "" where they are its rows or columns, or all the same."""
    if any(part.dim() != whole.dim() for part in parts):
        return COMBINES
    if all(_equal(part, whole) for part in parts):
        return ""
    if not whole.dim():
        return "" if _equal(torch.stack(list(parts)).sum(0), whole) else COMBINES
    problem = COMBINES
    # The batch may be the second dim.
    for dim in range(min(2, whole.dim())):
        lengths = [part.shape[dim] for part in parts]
        if sum(lengths) != whole.shape[dim]:
            continue
        pairs = list(zip(whole.split(lengths, dim), parts, strict=True))
        if all(_is_part(piece, part) for piece, part in pairs):
            return ""
        if all(_is_shorter(piece, part) for piece, part in pairs):
            problem = PADS
    return problem


def _is_part(piece: Tensor, part: Tensor) -> bool:
    if piece.shape != part.shape or _equal(piece, part) or part.is_floating_point() or part.is_complex():
        return _equal(piece, part)
    # The places of nodes of graphs, counted from the first of the batch.
    return len((piece.long() - part.long()).unique()) == 1


def _is_shorter(piece: Tensor, part: Tensor) -> bool:
    """Whether a part is the beginning, or the end, of a piece in each dim."""
    if any(length > whole for whole, length in zip(piece.shape, part.shape, strict=True)):
        return False
    begin, end = piece, piece
    for dim, length in enumerate(part.shape):
        begin, end = begin.narrow(dim, 0, length), end.narrow(dim, end.shape[dim] - length, length)
    return _equal(begin, part) or _equal(end, part)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    tolerance = 1e-9 if one.dtype in (torch.float64, torch.complex128) else 1e-5
    return torch.allclose(one, other.to(one.dtype), rtol=tolerance, atol=0, equal_nan=True)
