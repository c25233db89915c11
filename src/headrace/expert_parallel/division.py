"""Which part of a model's experts a rank has, and how a whole one is made of the ranks' parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.expert_parallel.balance import Balance
from headrace.expert_parallel.finding import ExpertSet, bounds_of, experts_of
from headrace.expert_parallel.listed import ListedExperts
from headrace.expert_parallel.rows import RowLink
from headrace.expert_parallel.stacked import StackedExperts
from headrace.trees import as_bytes


class ExpertDivision:
    """The experts of a module, divided in place: of stacked ones a rank keeps its rows, of listed ones some entries.

    Args:
        link: the ranks that divide the experts of a replica.
        every: all ranks of the run, of whose tokens the router's loss is made.
        parts: whether batches are cut into micro-batches.
        copies: whether what this rank holds gets memory of its own, so that the rest is free.

    Attributes:
        experts: whose each parameter of an expert is, by name.
        shapes: of all parameters of the model, whole, by name.
        held: by name, which rows of its experts' parameters this rank has: all of an entry of a list.
        balance: the router's loss.
    """

    def __init__(
        self,
        module: nn.Module,
        found: Sequence[ExpertSet],
        link: RowLink,
        every: RowLink,
        parts: bool = False,
        copies: bool = True,
    ) -> None:
        self.found, self.link, self.every = found, link, every
        self.shapes = {name: each.shape for name, each in module.named_parameters()}
        self.experts = experts_of(found)
        bounds = {name: (spec, *bounds_of(spec.count, link.world)[link.rank]) for name, spec in self.experts.items()}
        self.held = {
            name: slice(start, stop) if spec.index < 0 else slice(None)
            for name, (spec, start, stop) in bounds.items()
            if spec.index < 0 or start <= spec.index < stop
        }
        self.balance = Balance(module, every, parts)
        for each in found:
            self._divide(module, each, copies)

    def _divide(self, module: nn.Module, experts: ExpertSet, copies: bool) -> None:
        start, stop = bounds_of(experts.count, self.link.world)[self.link.rank]
        if experts.stacked:
            for name, parameter in dict(experts.module.named_parameters()).items():
                rows = parameter.detach()[start:stop]
                _put(experts.module, name, rows.clone() if copies else rows, parameter.requires_grad)
            StackedExperts(experts, self.link)
            return
        for number, entry in enumerate(experts.module.children()):
            if not start <= number < stop:
                for name, parameter in dict(entry.named_parameters()).items():
                    _put(entry, name, torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        ListedExperts(experts, module.get_submodule(experts.caller), self.link)

    def elsewhere(self) -> list[str]:
        """Returns the names of the parameters of which this rank has nothing."""
        return [name for name in self.experts if name not in self.held]

    def first(self, name: str) -> int:
        """Returns the element of a parameter at which what this rank has of it begins."""
        return (self.held[name].start or 0) * math.prod(self.shapes[name][1:]) if name in self.held else 0

    def joined(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns an expert's parameter, whole, in host memory; `part` is this rank's, None for an entry elsewhere."""
        whole = torch.zeros(self.shapes[name], dtype=dtype)
        if part is not None:
            (whole if self.experts[name].index >= 0 else whole[self.held[name]]).copy_(part)
        # As bytes: a sum of numbers would lose the sign of a zero.
        self.link.group.all_reduce(as_bytes(whole))
        return whole

    def describe(self) -> str:
        """Says how many experts there are, and over how many workers they are divided."""
        counts = sorted({each.count for each in self.found})
        return (
            f"{' or '.join(map(str, counts))} experts in each of {len(self.found)} layers are divided over "
            f"{self.link.world} workers"
        )


def _put(module: nn.Module, name: str, value: Tensor, trained: bool) -> None:
    owner, _, key = name.rpartition(".")
    setattr(module.get_submodule(owner), key, nn.Parameter(value, trained))
