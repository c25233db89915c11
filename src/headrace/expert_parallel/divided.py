"""A model whose experts are divided among ranks, and this rank's part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective
from headrace.expert_parallel.balance import Balance
from headrace.expert_parallel.finding import ExpertSet, bounds_of, experts_of
from headrace.expert_parallel.listed import ListedExperts
from headrace.expert_parallel.rows import RowLink
from headrace.expert_parallel.stacked import StackedExperts
from headrace.hooks import hooks_of
from headrace.modules import parameters_and_buffers
from headrace.training.buckets import sum_over
from headrace.training.gradients import divide
from headrace.trees import as_bytes


class DividedExperts:
    """A module whose experts have been divided in place. The rest is whole on every rank.

    Args:
        link: the ranks that divide the experts of a replica.
        every: all ranks of the run, over which the rest is summed, and the router's loss made.
        parts: whether batches are cut into micro-batches.
        copies: whether what this rank holds gets memory of its own, so that the rest is free.
        fill: gives memory to this rank's experts, by name, of a model that is made in parts.

    Attributes:
        pieces: this rank's part of each trained parameter, by name; of an expert elsewhere it is empty.
        whole: names of the trained parameters that every rank holds.
        half: None: nothing is computed in another type than the parameters have.
        device: where the module is.
        seen: names of the parameters of which this rank has made a gradient since `begin`.
        balance: the router's loss.
    """

    half: torch.dtype | None = None

    def __init__(
        self,
        module: nn.Module,
        found: Sequence[ExpertSet],
        link: RowLink,
        every: RowLink,
        parts: bool = False,
        copies: bool = True,
        fill: Callable[[Mapping[str, slice]], None] = lambda held: None,
    ) -> None:
        self.module, self._found, self._link, self._every = module, found, link, every
        self.device = next((each.device for each in module.parameters() if not each.is_meta), torch.device("cpu"))
        self.seen: set[str] = set()
        specs = {name: each for name, each in module.named_parameters()}
        self._shapes = {name: each.shape for name, each in specs.items()}
        self._experts = experts_of(found)
        self.balance = Balance(module, every, parts)
        for each in found:
            self._divide(each, copies)
        fill(self._held())
        self._parameters = dict(module.named_parameters())
        trained = {name: each for name, each in self._parameters.items() if each.requires_grad}
        for name, parameter in trained.items():
            if not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(self._note(name, name in self._experts))
        self._hooks = {name: hooks_of(each) for name, each in self._parameters.items()}
        self.whole = frozenset(trained.keys() - self._experts.keys())
        self.pieces = {
            name: each if name in self.whole else nn.Parameter(_flat(each)) for name, each in trained.items()
        }

    def _divide(self, experts: ExpertSet, copies: bool) -> None:
        start, stop = bounds_of(experts.count, self._link.world)[self._link.rank]
        if experts.stacked:
            for name, parameter in dict(experts.module.named_parameters()).items():
                rows = parameter.detach()[start:stop]
                _put(experts.module, name, rows.clone() if copies else rows, parameter.requires_grad)
            StackedExperts(experts, self._link)
            return
        for number, entry in enumerate(experts.module.children()):
            if not start <= number < stop:
                for name, parameter in dict(entry.named_parameters()).items():
                    _put(entry, name, torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        ListedExperts(experts, self.module.get_submodule(experts.caller), self._link)

    def _held(self) -> dict[str, slice]:
        """Returns the names of this rank's experts, with the rows that it has of each."""
        own = {
            count: bounds_of(count, self._link.world)[self._link.rank] for count in (each.count for each in self._found)
        }
        bounds = {name: (spec, *own[spec.count]) for name, spec in self._experts.items()}
        return {
            name: slice(start, stop) if spec.index < 0 else slice(None)
            for name, (spec, start, stop) in bounds.items()
            if spec.index < 0 or start <= spec.index < stop
        }

    def parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yields what this rank holds of experts: the name, the first element, and the elements, flat."""
        for name, spec in self._experts.items():
            each = self._parameters[name].detach()
            start = bounds_of(spec.count, self._link.world)[self._link.rank][0] if spec.index < 0 else 0
            if not each.is_meta:
                yield name, start * math.prod(self._shapes[name][1:]), each.view(-1)

    def _note(self, name: str, expert: bool) -> Callable[[Tensor], None]:
        # What experts make a gradient of may be other ranks' tokens.
        return lambda _: self.seen.add(name) if expert or not self._link.silent else None

    def begin(self) -> None:
        """Forgets the gradients of the last step."""
        self.seen.clear()
        for name, piece in self.pieces.items():
            self._parameters[name].grad = piece.grad = None

    def hooked(self) -> list[str]:
        """Returns the names of the parameters that user code has hung hooks on."""
        return [name for name, each in self._parameters.items() if hooks_of(each) != self._hooks[name]]

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Takes part in what the others compute, without tokens of its own."""
        held = [(self._parameters[name], _copy(self._parameters[name].grad)) for name in self.whole]
        with self._link.silenced(), self._every.silenced():
            yield
        for parameter, gradient in held:
            parameter.grad = gradient

    def divide(self, weight: float | Tensor) -> None:
        """Divides the gradients by the weight of all examples."""
        divide([each.grad for each in self._parameters.values()], weight)

    def sum_gradients(self, missing: Callable[[str], bool], mates: Collective | None) -> list[tuple[str, Tensor]]:
        """Puts gradients into the pieces, except those of parameters of which no rank has one.

        Those of experts are of all tokens of this replica's ranks, and are summed over `mates`, which hold the same
        experts of others; the rest is summed over all ranks.
        """
        found, summed = [], []
        for name, piece in self.pieces.items():
            parameter = self._parameters[name]
            piece.grad, gradient, parameter.grad = None, parameter.grad, None
            if missing(name) or parameter.is_meta:
                continue
            gradient = torch.zeros_like(piece) if gradient is None else gradient.view(piece.shape)
            found.append((name, gradient))
            summed += [gradient.view(-1)] if name in self.whole else []
        sum_over(self._every.carrier, summed)
        if mates:
            sum_over(mates, [gradient for name, gradient in found if name not in self.whole])
        for name, gradient in found:
            self.pieces[name].grad = gradient
        return found

    def reshard(self) -> None:
        """Does nothing: no rank gathers what others hold."""

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter whole, and every buffer, by checkpoint name, on the ranks that lead."""
        for name, tensor in parameters_and_buffers(self.module):
            kind, _, parameter = name.partition("/")
            if kind == "parameter" and parameter in self._experts:
                tensor = self._joined(parameter, tensor)
            if leads:
                yield name, tensor

    def held_bytes(self) -> int:
        """Returns the bytes of the parameters that this rank holds."""
        return sum(each.nbytes for each in self._parameters.values() if not each.is_meta)

    def describe(self) -> str:
        """Says how the experts are divided."""
        counts = sorted({each.count for each in self._found})
        experts = sum(self._shapes[name].numel() * self._parameters[name].element_size() for name in self._experts)
        whole = sum(each.nbytes for name, each in self._parameters.items() if name not in self._experts)
        return (
            f"{' or '.join(map(str, counts))} experts in each of {len(self._found)} layers are divided over "
            f"{self._link.world} workers: {experts:,} bytes of parameters; every worker holds the other {whole:,}"
        )

    def _joined(self, name: str, part: Tensor) -> Tensor:
        """Returns an expert's parameter, whole, in host memory."""
        spec, shape, link = self._experts[name], self._shapes[name], self._link
        whole = torch.zeros(shape, dtype=part.dtype)
        start, stop = bounds_of(spec.count, link.world)[link.rank]
        if spec.index < 0:
            whole[start:stop] = part.cpu()
        elif start <= spec.index < stop:
            whole.copy_(part)
        # As bytes: a sum of numbers would lose the sign of a zero.
        link.group.all_reduce(as_bytes(whole))
        return whole


def _put(module: nn.Module, name: str, value: Tensor, trained: bool) -> None:
    owner, _, key = name.rpartition(".")
    setattr(module.get_submodule(owner), key, nn.Parameter(value, trained))


def _flat(parameter: Tensor) -> Tensor:
    return torch.empty(0, dtype=parameter.dtype) if parameter.is_meta else parameter.detach().view(-1)


def _copy(gradient: Any) -> Any:
    return None if gradient is None else gradient.clone()
