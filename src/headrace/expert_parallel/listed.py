"""Experts that are entries of a list: each rank has some of them, and computes the tokens of all ranks that go there.

The forward that calls them runs twice. In the first run every expert notes what it is called with, and gives zeros;
then all tokens travel at once, and in the second run the experts give what has come back:

    first run    router ─► expert 0 ◄─ rows   expert 1 ◄─ rows   ...   (noted)
    exchange     rows ─► the ranks that hold the experts ─► outputs ─► back
    second run   router ─► expert 0 ─► output   expert 1 ─► output   ...

The router is small beside the experts. What it draws, it draws twice alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.expert_parallel.finding import ExpertSet, bounds_of
from headrace.expert_parallel.rows import RowLink, send, transposed
from headrace.machine.generators import forked_generators, random_states, set_random_states
from headrace.trees import map_tensors


class _Call(NamedTuple):
    """What an expert is called with; its last dim is a token."""

    expert: int
    given: Tensor

    @property
    def rows(self) -> Tensor:
        return self.given.reshape(-1, self.given.shape[-1])


class ListedExperts:
    """Takes the place of the forward of each expert, and of the module that calls them."""

    def __init__(self, experts: ExpertSet, caller: nn.Module, link: RowLink) -> None:
        self._link, self._name, self._count = link, experts.name, experts.count
        self._bounds = bounds_of(experts.count, link.world)
        self._caller, self._run = caller, caller.forward
        self._calls: list[_Call] = []
        self._outputs: Sequence[Tensor] | None = None
        self._same: list[Tensor] = []
        self._active = self._looked = False
        # Of what comes in, what goes out: a row of each, by its form.
        self._forms: dict[tuple[object, ...], Tensor] = {}
        entries: list[Any] = list(experts.module.children())
        self._experts = {number: entries[number].forward for number in range(*self._bounds[link.rank])}
        for number, entry in enumerate(entries):
            entry.forward = partial(self._called, number)
        module: Any = caller
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what the module does whose experts these are."""
        if self._active:
            raise UsageError(f"the experts of {self._name!r} are called within each other; use mirrored")
        self._active, self._calls, self._outputs, self._same = True, [], None, []
        # Again in each forward: one that checkpoints run again must do what the first one did.
        self._forms.clear()
        try:
            before = _random()
            self._first_run(args, kwargs)
            drawn = _random()
            self._outputs, back = self._exchanged()
            last = _random()
            if changed := any(not torch.equal(before[kind], drawn[kind]) for kind in drawn):
                _set_random(before)
            made = self._run(*args, **kwargs)
            if changed:
                _set_random(last)
            if len(self._same) != len(self._calls) or not all(bool(each) for each in self._same):
                raise self._differs()
        finally:
            self._active, self._calls, self._outputs, self._same = False, [], None, []
        return made if back is None else map_tensors(lambda each: _follow(each, back), made)

    def _first_run(self, args: Any, kwargs: Any) -> None:
        # With copies: backward comes to this run too, and what it has kept must not change after it.
        kept = [(each, dict(each.named_buffers(recurse=False))) for each in self._caller.modules()]
        copies = {id(buffer): buffer.detach().clone() for buffer in self._caller.buffers()}
        looked = [] if self._looked else [(buffer, buffer.detach().clone()) for buffer in self._caller.buffers()]
        self._looked = True
        try:
            for owner, buffers in kept:
                _set_buffers(owner, {name: copies[id(buffer)] for name, buffer in buffers.items()})
            self._run(*args, **kwargs)
        finally:
            for owner, buffers in kept:
                _set_buffers(owner, buffers)
        if not all(torch.equal(buffer, before) for buffer, before in looked):
            raise UsageError(
                f"the forward of {type(self._caller).__name__} changes a buffer by another name than the one it is "
                "registered by, and expert_parallel runs it twice: it would change it twice; use self.<buffer>"
            )

    def _called(self, number: int, *args: Any, **kwargs: Any) -> Tensor:
        if not self._active:
            raise UsageError(
                f"expert {number} of {self._name!r} was called outside of the forward of "
                f"{type(self._caller).__name__}, where expert_parallel expects it; use mirrored"
            )
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            raise UsageError(
                f"expert {number} of {self._name!r} was called with {len(args)} arguments and {len(kwargs)} by name; "
                "under expert_parallel it takes one tensor, whose last dim is a token: use mirrored"
            )
        call = _Call(number, args[0])
        if self._outputs is None:
            self._calls.append(call)
            width = self._form(call.rows).shape[-1]
            return self._form(call.rows).new_zeros(*call.given.shape[:-1], width)
        at = len(self._same)
        noted = self._calls[at] if at < len(self._calls) else None
        if noted is None or noted.expert != number or noted.given.shape != call.given.shape:
            raise self._differs()
        first, second = noted.given.detach(), call.given.detach()
        self._same.append(((first == second) | ((first != first) & (second != second))).all())
        return self._outputs[at]

    def _differs(self) -> UsageError:
        return UsageError(
            f"the forward of {type(self._caller).__name__} calls the experts of {self._name!r} with other tokens when "
            "it is run again, as where what one expert gives decides what another is called with, or where forward "
            "draws numbers outside of torch; expert_parallel runs it twice: use mirrored"
        )

    def _form(self, rows: Tensor) -> Tensor:
        """Returns a row of an expert's output, as for such rows."""
        half = torch.get_autocast_dtype(rows.device.type) if torch.is_autocast_enabled(rows.device.type) else None
        key = (rows.shape[-1], rows.dtype, half)
        if key not in self._forms:
            first = next(iter(self._experts.values()))
            with torch.no_grad(), forked_generators(self._caller):
                made = first(rows.new_zeros(1, rows.shape[-1]))
            if not isinstance(made, Tensor) or made.dim() != 2 or len(made) != 1:
                raise UsageError(
                    f"an expert of {self._name!r} makes no row of a row of {rows.shape[-1]} numbers; expert_parallel "
                    "gives it tokens, one a row: use mirrored"
                )
            self._forms[key] = made
        return self._forms[key]

    def _exchanged(self) -> tuple[list[Tensor], Tensor | None]:
        """Returns the output of each call, and what backward must come to where no output leads there."""
        link, calls = self._link, self._calls
        if not calls:
            raise UsageError(
                f"the forward of {type(self._caller).__name__} calls none of the experts of {self._name!r}, which "
                "other workers wait for; use mirrored"
            )
        if len({(each.given.shape[-1], each.given.dtype) for each in calls}) > 1:
            raise UsageError(f"the experts of {self._name!r} are called with rows of several forms; use mirrored")
        order = [] if link.silent else sorted(range(len(calls)), key=lambda place: calls[place].expert)
        told = self._told([calls[place] for place in order])
        sizes = [[sum(row[start:stop]) for start, stop in self._bounds] for row in told]
        empty = calls[0].rows[:0]
        (got,) = send(link, sizes, (torch.cat([empty, *(calls[place].rows for place in order)]),))
        (back,) = send(link, transposed(sizes), (self._computed(got, told),), got)
        width = back.shape[-1]
        if link.silent:
            return [back.new_zeros(*call.given.shape[:-1], width) for call in calls], back
        parts = back.split([len(calls[place].rows) for place in order])
        made = {
            place: part.reshape(*calls[place].given.shape[:-1], width) for place, part in zip(order, parts, strict=True)
        }
        return [made[place] for place in range(len(calls))], None

    def _told(self, calls: Sequence[_Call]) -> list[list[int]]:
        """Returns of every rank how many rows it has for each expert, and then which it calls."""
        rows, called = [0] * self._count, [0] * self._count
        for call in calls:
            rows[call.expert] += len(call.rows)
            called[call.expert] = 1
        return self._link.numbers([*rows, *called])

    def _computed(self, got: Tensor, told: Sequence[Sequence[int]]) -> Tensor:
        """Returns what this rank's experts make of the rows that came, in the order of these."""
        local = list(self._experts)
        parts = iter(got.split([row[expert] for row in told for expert in local]))
        given = [{expert: next(parts) for expert in local} for _ in told]
        made: Mapping[int, tuple[Tensor, ...]] = {
            # One that no rank calls has no gradient, as on one device.
            expert: self._experts[expert](torch.cat([each[expert] for each in given])).split(
                [row[expert] for row in told]
            )
            for expert in local
            if any(row[self._count + expert] for row in told)
        }
        outputs = [made[expert][rank] for rank in range(len(told)) for expert in local if expert in made]
        return torch.cat([self._form(got)[:0], *outputs])


class _Follow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, after: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _follow(x: Tensor, after: Tensor) -> Tensor:
    """Lets backward come to `after`, with zeros."""
    if not x.is_floating_point():
        return x
    made: Tensor = _Follow.apply(x, after)  # type: ignore[no-untyped-call]
    return made


def _set_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)


def _random() -> dict[str, Tensor]:
    return {"": torch.get_rng_state(), **random_states()}


def _set_random(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states[""])
    set_random_states({kind: state for kind, state in states.items() if kind})
