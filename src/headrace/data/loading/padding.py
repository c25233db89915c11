"""Batches of examples of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.data.pipeline.source import collate
from headrace.errors import DataError


def padded(examples: Sequence[Any], value: float, length: int | None = None) -> Any:
    """Returns the batch of examples whose tensors differ in their first dim, filled up at its end.

    Args:
        examples: at least one, all of one structure.
        value: to fill up with.
        length: to fill up to; None for the longest of these.

    Raises:
        DataError: they differ in more, or one is longer than `length`.
    """
    first = examples[0]
    if isinstance(first, Mapping):
        return {name: padded([example[name] for example in examples], value, length) for name in first}
    if isinstance(first, tuple):
        return tuple(padded(column, value, length) for column in zip(*examples, strict=True))
    if not isinstance(first, Tensor | np.ndarray | list):
        return collate(examples)
    tensors = [torch.as_tensor(example) for example in examples]
    if any(tensor.dim() == 0 for tensor in tensors):
        return collate(tensors)
    if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1:
        shapes = sorted({f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors})
        raise DataError(f"examples of a batch differ in more than their first dim: {' and '.join(shapes[:4])}")
    longest = max(len(tensor) for tensor in tensors)
    if length is not None and longest > length:
        raise DataError(f"an example is {longest} long, and pad_to is {length}; cut it in a map, or raise pad_to")
    batch = tensors[0].new_full((len(tensors), length or longest, *tensors[0].shape[1:]), value)
    for row, tensor in zip(batch, tensors, strict=True):
        row[: len(tensor)] = tensor
    return batch
