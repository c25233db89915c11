"""Experts whose parameters are stacked: each rank has some rows of them, and computes the tokens that go there."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.expert_parallel.finding import ExpertSet, bounds_of
from headrace.expert_parallel.rows import RowLink, send, transposed


class StackedExperts:
    """Takes the place of the experts' forward, whose parameters are this rank's rows already.

    A token goes once to each rank that holds one of its experts, and comes back as the weighted sum of these.
    """

    def __init__(self, experts: ExpertSet, link: RowLink) -> None:
        self._link, self._name = link, experts.name
        self._bounds = bounds_of(experts.count, link.world)
        self._compute: Any = experts.module.forward
        self._signature = inspect.signature(experts.module.forward)
        module: Any = experts.module
        start, stop = self._bounds[link.rank]
        module.num_experts = stop - start
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Computes what the whole module does."""
        tokens, index, weights = self._signature.bind(*args, **kwargs).arguments.values()
        if index.shape != weights.shape or index.dim() != 2 or tokens.dim() != 2:
            raise UsageError(
                f"{self._name!r} was called with tokens {tuple(tokens.shape)}, experts {tuple(index.shape)} and "
                f"weights {tuple(weights.shape)}; expert_parallel takes (tokens, width), (tokens, k) and (tokens, k): "
                "use mirrored"
            )
        link = self._link
        takes = [((index >= start) & (index < stop)).any(1) for start, stop in self._bounds]
        if link.silent:
            takes = [torch.zeros_like(each) for each in takes]
        order = [each.nonzero().squeeze(1) for each in takes]
        sizes = link.numbers([len(each) for each in order])
        rows = torch.cat(order)
        got = send(link, sizes, (tokens[rows], weights[rows], index[rows]))
        there = self._computed(*got)
        (back,) = send(link, transposed(sizes), (there,), got[0])
        return back.new_zeros(len(tokens), *back.shape[1:]).index_add(0, rows, back)

    def _computed(self, tokens: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Returns the sum of what this rank's experts make of each token."""
        start, stop = self._bounds[self._link.rank]
        row, place = ((index >= start) & (index < stop)).nonzero(as_tuple=True)
        chosen = index[row, place, None] - start
        made: Tensor = self._compute(tokens[row], chosen, weights[row, place, None])
        return made.new_zeros(len(tokens), *made.shape[1:]).index_add(0, row, made)
