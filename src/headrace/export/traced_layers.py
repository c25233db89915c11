"""What torch computes in another way while a model is traced, so that every format has the operations.

Recurrent layers stay one operation of the program, so that a sequence may have any length; adaptive pooling is computed
by slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace import internals

_Impl = Callable[..., tuple[Tensor, ...]]


def _lstm(input: Tensor, hx: Sequence[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    """Returns empty tensors of the shapes that `aten::lstm.input` returns."""
    hidden, cells = hx
    return _output(input, hidden, settings), torch.empty_like(hidden), torch.empty_like(cells)


def _gru(input: Tensor, hx: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    """Returns empty tensors of the shapes that `aten::gru.input` returns."""
    return _output(input, hx, settings), torch.empty_like(hx)


def _output(input: Tensor, hidden: Tensor, settings: Sequence[Any]) -> Tensor:
    # Both operations end with (..., bidirectional, batch_first).
    directions = 1 + bool(settings[-2])
    return input.new_empty((*input.shape[:-1], hidden.shape[-1] * directions))


_LAYERS: tuple[tuple[Any, _Impl], ...] = ((torch.ops.aten.lstm.input, _lstm), (torch.ops.aten.gru.input, _gru))


@contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """Lets tracing compute only the shapes of recurrent layers.

    torch's own implementation in Python unrolls the time steps, which fixes their number in the program. The operation
    itself stays in the graph either way, and takes any number.
    """
    saved = [dict(operation.py_kernels) for operation, _ in _LAYERS]
    try:
        for operation, shapes in _LAYERS:
            _replace(operation, dict.fromkeys(operation.py_kernels, shapes))
        yield
    finally:
        for (operation, _), kernels in zip(_LAYERS, saved, strict=True):
            _replace(operation, kernels)


def _replace(operation: Any, kernels: dict[Any, Any]) -> None:
    operation.py_kernels.clear()
    operation.py_kernels.update(kernels)
    internals.kernels_found(operation).clear()


@contextmanager
def pooled_by_slices() -> Iterator[None]:
    """Lets a model that is traced compute `adaptive_max_pool1d` and `2d` by slices; the values are the same."""
    originals = F.adaptive_max_pool1d, F.adaptive_max_pool2d
    F.adaptive_max_pool1d, F.adaptive_max_pool2d = _pool1d, _pool2d  # type: ignore[assignment]
    try:
        yield
    finally:
        F.adaptive_max_pool1d, F.adaptive_max_pool2d = originals


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
