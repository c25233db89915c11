"""A mixture of experts, written as one writes it first: a loop over the experts, for the tokens of each."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def mixed(x: Tensor, router: nn.Module, experts: Iterable[nn.Module]) -> Tensor:
    """Returns what the two best experts of each token make of it, of the form of `x`."""
    tokens = x.flatten(0, -2)
    weights, chosen = router(tokens).softmax(-1).topk(2)
    made = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        row, place = torch.where(chosen == number)
        made = made.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
    return made.view_as(x)
