"""A proximal term: workers that step alone are held near the parameters that they began from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class ProximalTerm:
    """Adds `weight / 2 * |x - x0|^2` to a worker's loss, by its gradient (Li et al., "FedProx", 2020, algorithm 2).

    `named` are the worker's trainable parameters; `began` says after which round the last synchronization was, whose
    result is x0.
    """

    def __init__(self, weight: float, named: Mapping[str, nn.Parameter], began: Callable[[], int]) -> None:
        self._weight, self._parameters, self._began = weight, list(named.values()), began
        self._stretch = -1
        self._anchor: list[Tensor] = []
        self.nbytes = sum(each.nbytes for each in self._parameters)

    @torch.no_grad()
    def add(self) -> None:
        """Adds the term's gradient to that of the loss, of which every parameter now has one, as by autograd."""
        if self._stretch != self._began():
            self._stretch, self._anchor = self._began(), [each.detach().clone() for each in self._parameters]
        for parameter, anchor in zip(self._parameters, self._anchor, strict=True):
            if not parameter.requires_grad:
                continue
            way = (parameter - anchor).mul_(self._weight)
            parameter.grad = way if parameter.grad is None else parameter.grad.add_(way)
