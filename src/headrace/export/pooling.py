"""Adaptive pooling by slices, which every format has, where it has no operation for the pooling itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def pooled_by_slices() -> Iterator[None]:
    """Lets a model that is traced compute `adaptive_max_pool1d` and `2d` by slices; the values are the same."""
    kept = F.adaptive_max_pool1d, F.adaptive_max_pool2d
    F.adaptive_max_pool1d, F.adaptive_max_pool2d = _pool1d, _pool2d  # type: ignore[assignment]
    try:
        yield
    finally:
        F.adaptive_max_pool1d, F.adaptive_max_pool2d = kept


def _pool1d(input: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:
    _refuse(return_indices)
    return _pooled(input, output_size, -1)


def _pool2d(input: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:
    _refuse(return_indices)
    height, width = (output_size, output_size) if isinstance(output_size, int) else output_size
    rows, columns = input.shape[-2:]
    if height and width and rows % height == 0 and columns % width == 0:
        window = rows // height, columns // width
        # XNNPACK's partitioner wants the stride named.
        return F.max_pool2d(input, window, window)
    return _pooled(_pooled(input, height, -2), width, -1)


def _pooled(input: Tensor, size: int | None, dim: int) -> Tensor:
    """Returns the largest value of each of `size` slices, which begin and end as torch's do."""
    length = input.shape[dim]
    if size is None or size == length:
        return input
    slices = [(index * length // size, -(-(index + 1) * length // size)) for index in range(size)]
    return torch.cat([input.narrow(dim, start, stop - start).amax(dim, keepdim=True) for start, stop in slices], dim)


def _refuse(return_indices: bool) -> None:
    if return_indices:
        raise NotImplementedError("adaptive pooling that returns where the largest values were")
