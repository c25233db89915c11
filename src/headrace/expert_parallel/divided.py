"""A model whose experts are divided among ranks, and this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective
from headrace.expert_parallel.division import ExpertDivision
from headrace.expert_parallel.finding import ExpertSet
from headrace.expert_parallel.rows import RowLink
from headrace.hooks import hooks_of
from headrace.modules import parameters_and_buffers
from headrace.training.buckets import sum_over
from headrace.training.gradients import divide


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
        self.module = module
        self.device = next((each.device for each in module.parameters() if not each.is_meta), torch.device("cpu"))
        self.seen: set[str] = set()
        self._division = ExpertDivision(module, found, link, every, parts, copies)
        self._experts, self._link, self._every = self._division.experts, link, every
        self.balance = self._division.balance
        fill(self._division.held)
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

    def parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yields what this rank holds of experts: the name, the first element, and the elements, flat."""
        for name in self._division.held:
            yield name, self._division.first(name), self._parameters[name].detach().view(-1)

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
                tensor = self._division.joined(parameter, None if tensor.is_meta else tensor, tensor.dtype)
            if leads:
                yield name, tensor

    def held_bytes(self) -> int:
        """Returns the bytes of the parameters that this rank holds."""
        return sum(each.nbytes for each in self._parameters.values() if not each.is_meta)

    def describe(self) -> str:
        """Says how the experts are divided."""
        shapes = self._division.shapes
        experts = sum(shapes[name].numel() * self._parameters[name].element_size() for name in self._experts)
        whole = sum(each.nbytes for name, each in self._parameters.items() if name not in self._experts)
        return f"{self._division.describe()}: {experts:,} bytes of parameters; every worker holds the other {whole:,}"


def _flat(parameter: Tensor) -> Tensor:
    return torch.empty(0, dtype=parameter.dtype) if parameter.is_meta else parameter.detach().view(-1)


def _copy(gradient: Any) -> Any:
    return None if gradient is None else gradient.clone()
