"""LSTM and GRU layers that stay one operation of an exported program, so that a sequence may have any length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
    kept = [dict(operation.py_kernels) for operation, _ in _LAYERS]
    try:
        for operation, shapes in _LAYERS:
            _replace(operation, dict.fromkeys(operation.py_kernels, shapes))
        yield
    finally:
        for (operation, _), kernels in zip(_LAYERS, kept, strict=True):
            _replace(operation, kernels)


def _replace(operation: Any, kernels: dict[Any, Any]) -> None:
    operation.py_kernels.clear()
    operation.py_kernels.update(kernels)
    internals.kernels_found(operation).clear()
