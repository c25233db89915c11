"""The optimizers of torch that treat every element alone, whatever their numbers: they need no trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from headrace.training.optimizer import has_step_hooks
from headrace.trees import tensors_of

_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
)
_TRIED = ("capturable", "differentiable", "fused", "foreach")
"""Options that say how a step is computed."""
_TYPES = (torch.float32, torch.float64)


def known_kept(factory: Callable[..., Any], tensors: Iterable[Tensor]) -> int | None:
    """Returns how many tensors of a parameter's size such an optimizer keeps of it; None for any other one."""
    kind, options = (factory.func, factory.keywords) if isinstance(factory, partial) else (factory, {})
    if kind not in _ELEMENTWISE or (isinstance(factory, partial) and factory.args):
        return None
    assert isinstance(kind, type)
    # The caller's program may have replaced the step.
    replaced = Path(kind.step.__code__.co_filename).parent != Path(optim.__file__).parent
    if replaced or not all(_is_number(value) and name not in _TRIED for name, value in options.items()):
        return None
    if any(tensor.dtype not in _TYPES for tensor in tensors):
        return None
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = kind([parameter], **options)
    if has_step_hooks(optimizer):
        return None
    optimizer.step()
    return sum(each.numel() == 2 for each in tensors_of(optimizer.state[parameter]))


def _is_number(value: object) -> bool:
    each = value if isinstance(value, tuple) else (value,)
    return all(isinstance(number, bool | int | float) for number in each)
