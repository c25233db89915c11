"""What the tests save: tensors of every kind, and small states that can be told apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headrace.checkpoint import CheckpointFolder
from headrace.checkpoint.tensors import _TYPES

__all__ = ["DTYPES", "equal", "odd_tensors", "save", "small_state"]

DTYPES = dict(_TYPES)


def odd_tensors() -> dict[str, Tensor]:
    """Returns one tensor of every dtype, and shapes and strides of every kind."""
    torch.manual_seed(0)
    flat = torch.randn(1000)
    typed = {name: torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    return typed | {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0),
        "empty of rank 3": torch.empty(4, 0, 7, dtype=torch.int8),
        "a view of a flat buffer": flat[10:20],
        "every third": flat[::3],
        "transposed": torch.randn(30, 40).t(),
        "expanded": torch.randn(3, 1).expand(3, 1000),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(7, dtype=torch.complex64).conj(),
        "negative": torch.randn(7, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
        'quotes " and \\ and \n and \N{SNOWMAN} and \0': torch.arange(5),
        "": torch.arange(2),
    }


def equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes, shapes and bits are the same."""
    return ours.keys() == theirs.keys() and all(_same(ours[name], theirs[name]) for name in ours)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for tensor in (one, other)]
    return torch.equal(bits[0].view(torch.uint8), bits[1].view(torch.uint8))


def small_state(step: int, rank: int = 0, numbers: int = 6) -> dict[str, Tensor]:
    """Returns a state that says whose it is."""
    return {
        "weight": torch.arange(numbers, dtype=torch.float32) + 1000 * step + 100 * rank,
        "step": torch.tensor(step),
    }


def save(folder: CheckpointFolder, step: int, ranks: int = 2, keep: int = 2, numbers: int = 6) -> Path:
    """Saves small states of some ranks; returns the checkpoint's path."""
    folder.begin(step)
    files = [folder.write(step, rank, small_state(step, rank, numbers)) for rank in range(ranks)]
    folder.commit(step, files, {"step": step}, keep)
    return folder.path / f"step-{step:08d}"
