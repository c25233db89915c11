"""What a job's optimizer needs: found by steps over random parameters, whole and divided as strategies divide them.

    the factory's optimizer over whole parameters          a  b  c  d    the reference
    elements divided among processes                       a' b' c' d' │ a'' b'' c'' d''
    parameters divided among processes                     a  c │ b  d
    a step in two calls                                    a  b, then c  d
    saved and loaded in the middle                         a  b  c  d ─► a  b  c  d

What differs from the reference is what the optimizer cannot do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headrace.api.probes.optimizers.forms import WRAPPED, forms_of, without_values
from headrace.api.probes.optimizers.known import known_kept
from headrace.api.probes.optimizers.placed import goes_by_place
from headrace.api.probes.optimizers.values import across, clipped, like, tried, wide
from headrace.errors import UsageError
from headrace.spec.model import OptimizerNeeds
from headrace.spec.options import Options
from headrace.spec.plan import Segment
from headrace.training.optimizer import (
    Factory,
    StatePiece,
    build,
    build_over,
    first_state,
    stand_in,
    state_stores,
)
from headrace.training.update import HasModes, Updater, group_settings
from headrace.training.user_code.attributes import attributes
from headrace.training.user_code.trial import drawn, without_compilers
from headrace.trees import MOST_NUMBERS, holds_tensor, tensors_of

_SCALES = (1.0, 1.0, 100.0, 0.01, 1.0, 1.0, 1.0)
"""How large the gradients of each step are, so that a limit on them is met; more steps than wrappers wait for."""
_ACROSS = (1, 4)
"""Steps whose gradients are at right angles to each row, for optimizers that look for such ones (AdamP)."""
_SAVED_AFTER = 4
_SMALL_LR = 0.01

_Values = dict[str, Tensor]


@dataclass(frozen=True)
class OptimizerFindings:
    """What was found.

    Attributes:
        sliceable: whether it treats every element alone.
        kept: how many tensors of a parameter's size it keeps of it, of the one of which it keeps most.
        needs: the rest.
    """

    sliceable: bool = True
    kept: int = 0
    needs: OptimizerNeeds = field(default_factory=OptimizerNeeds)


def together(every: Sequence[OptimizerFindings]) -> OptimizerFindings:
    """Returns what several optimizers need together."""
    needs = [vars(each.needs) for each in every]
    first = {name: next(filter(None, (own[name] for own in needs)), needs[0][name]) for name in needs[0]}
    sliceable, kept = all(each.sliceable for each in every), max(each.kept for each in every)
    return OptimizerFindings(sliceable, kept, OptimizerNeeds(**first))


def probe_optimizer(factory: Factory, named: Iterable[tuple[str, Tensor]]) -> OptimizerFindings:
    """Finds out what an optimizer needs, from the function that makes it and the parameters of a model.

    Raises:
        UsageError: its step needs a closure.
    """
    named = list(named)
    if (kept := known_kept(factory, (tensor for _, tensor in named))) is not None:
        return OptimizerFindings(kept=kept)
    # Some compile their step, again for each shape.
    with without_compilers():
        return _tried_out(factory, named)


def _tried_out(factory: Factory, named: Sequence[tuple[str, Tensor]]) -> OptimizerFindings:
    template = build(factory, [(name, _no_memory(tensor)) for name, tensor in named])
    if isinstance(template, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS.step() evaluates the loss several times, in a closure, and only one strategy does that; use "
            "hr.Sandblaster(workers=2) (--strategy sandblaster), or another optimizer"
        )
    error: BaseException | None = None
    for exact, every in ((False, False), (True, False), (False, True)):
        trial = _Trial(factory, named, template, exact, every)
        findings = []
        for trial.gradients in (False, True):
            try:
                findings.append(trial.find())
            except _Untried as failed:
                error = failed.__cause__
            if findings and not findings[-1].needs.coupled:
                return findings[-1]
        if findings:
            return findings[0]
    assert error is not None
    if isinstance(error, TypeError) or (trial.fails() and not trial.fails(lambda: 0.0)):
        raise UsageError(
            f"{type(template).__name__}.step() cannot be called by itself: {_text(error)}; optimizers that need a "
            "closure cannot be used here"
        ) from error
    why = f"{type(template).__name__}.step() could not be tried: {_text(error)}"
    return OptimizerFindings(False, 1, OptimizerNeeds(why, True, True, isinstance(template, HasModes)))


class _Untried(Exception):
    """The reference could not make its steps, because of its cause."""


class _OtherUpdate(Exception):
    """A step has made something else than the reference's."""


class _Trial:
    """Random values and gradients for some of a model's parameters; the others have no memory and no gradient.

    `exact` tries them in their own shape and type, else they are small, and in double precision; `every` tries all,
    for an optimizer that has made something of each. With `gradients` the others have empty ones.
    """

    gradients = False

    def __init__(
        self, factory: Factory, named: Sequence[tuple[str, Tensor]], template: Any, exact: bool, every: bool
    ) -> None:
        self._template, self._exact, self._factory = template, exact, factory
        self._tolerance = 1e-3 if exact else 1e-6
        self._named = [(name, _no_memory(tensor)) for name, tensor in named]
        generator = torch.Generator().manual_seed(0)
        shapes = dict(named)
        self._too_large = any(tensor.numel() > MOST_NUMBERS for tensor in shapes.values())
        self._start: _Values = {}
        for name in shapes if every else tried(template, shapes):
            tensor = shapes[name]
            shape = tensor.shape if exact else clipped(tensor.shape)
            value = torch.randn(shape, generator=generator, dtype=wide(tensor.dtype))
            self._start[name] = value.to(tensor.dtype) if exact else value
        # Of a common direction, so that estimates that grow along the way do grow.
        directions = {name: like(value, generator) for name, value in self._start.items()}
        self._gradients = [
            {name: scale * (directions[name] + 0.5 * like(value, generator)) for name, value in self._start.items()}
            for scale in _SCALES
        ]

    def find(self) -> OptimizerFindings:
        """Returns what the optimizer needs; raises `_Untried` if it makes no steps over whole parameters."""
        try:
            whole = self._whole(self._start)
        except Exception as error:
            raise _Untried from error
        if not self._exact and group_settings(whole.optimizer) != group_settings(self._template):
            raise _Untried from UsageError("its groups depend on the sizes of the parameters")
        before = drawn()
        middle, unsaved, settings = self._start, "", {}
        pieces: Sequence[StatePiece] = ()
        self._after: list[_Values] = []
        try:
            for step in range(len(_SCALES)):
                if step == _SAVED_AFTER:
                    middle = {name: each.view_as(self._start[name]) for name, each in _values([whole]).items()}
                    try:
                        pieces, settings = whole.state(), json.loads(json.dumps(whole.settings()))
                    except UsageError as error:
                        unsaved = str(error)
                for segment, tensor in whole.owned if step in _ACROSS else ():
                    gradients = self._gradients[step]
                    gradients[segment.parameter] = across(tensor.detach(), gradients[segment.parameter])
                self._step(whole, step)
                self._after.append(_values([whole]))
        except Exception as error:
            raise _Untried from error
        random = drawn() != before or self._draws()
        whole.swap_weights(averaged=True)
        kept = max((_kept(whole, tensor) for tensor in whole.parameters), default=0)
        shown = forms_of(whole.optimizer)
        forms, unsaved_too = without_values(self._factory, self._named) or (shown, "")
        unsaved = unsaved or unsaved_too
        # Blocks of quantised state begin elsewhere in a slice, and what no trial has shown may do so, too.
        sliceable = forms <= shown - {WRAPPED} and not self._problem(whole, lambda: self._divided(_inside))
        coupled = "" if sliceable else self._problem(whole, lambda: self._divided(_between))
        at_once = bool(self._problem(whole, self._in_two_calls))
        if self._too_large:
            # A checkpoint will hold small tensors of attributes alone.
            held = settings.get("attributes", {})
            settings |= {"attributes": {key: each for key, each in held.items() if not holds_tensor(each)}}
        if not unsaved and self._problem(whole, lambda: self._resumed(middle, pieces, settings)):
            unsaved = (
                f"{type(whole.optimizer).__name__} keeps something outside its groups, its state of parameters and its "
                f"attributes, or there a tensor of over {MOST_NUMBERS:,} numbers, and its steps after a resume would "
                "be others; keep tensors in the state of parameters, numbers in attributes, or use checkpoints=False"
            )
        if coupled:
            coupled = f"{type(whole.optimizer).__name__} looks at several parameters together ({coupled})"
        if random:
            coupled = f"{type(whole.optimizer).__name__}.step() draws random numbers"
        modes, values = isinstance(whole.optimizer, HasModes), self._reads_values()
        found = coupled, at_once or bool(coupled), values, modes, unsaved, random, self.gradients
        needs = OptimizerNeeds(*found, goes_by_place(self._built, self._start))
        return OptimizerFindings(sliceable and not coupled, kept, needs)

    def _draws(self) -> bool:
        """Tells whether a step over parameters of their own types draws random numbers, as rounding to bfloat16 may."""
        before, types = drawn(), {name: each.dtype for name, each in self._named}
        failed = self.fails(start={name: each.to(types[name]) for name, each in self._start.items()})
        return failed is None and drawn() != before

    def fails(self, *closure: Callable[[], float], start: _Values | None = None) -> Exception | None:
        """Returns what the first step raises, with a closure or without."""
        updater = self._whole(self._start if start is None else start)
        self._assign(updater, 0)
        try:
            updater.optimizer.step(*closure)
        except Exception as error:
            return error
        return None

    def _problem(self, whole: Updater, trained: Callable[[], list[Updater]]) -> str:
        """Returns what differs from the reference where the same steps are made otherwise, "" for nothing."""
        try:
            others = trained()
            for other in others:
                other.swap_weights(averaged=True)
        except _OtherUpdate as error:
            return str(error)
        except Exception as error:
            return _text(error)
        if other_update := self._apart(_values([whole]), _values(others)):
            return other_update
        settings = whole.settings()
        for other in others:
            if changed := _differing(settings, other.settings()):
                return f"{changed} differs"
        return ""

    def _apart(self, expected: _Values, found: _Values) -> str:
        for name, begun in self._start.items():
            start = begun.flatten()
            moved = float((expected[name] - start).abs().max()) if start.numel() else 0.0
            apart = float((expected[name] - found[name]).abs().max()) if start.numel() else 0.0
            if not apart <= self._tolerance * moved + 1e-14:
                return f"the update of {name!r} is another one, by {apart / (moved or 1.0):.1e} of what it moves"
        return ""

    def _require_same(self, updaters: Sequence[Updater], step: int) -> None:
        """Raises where values are apart after a step, which later steps may hide (a limit on weights)."""
        # A small step in single precision is all rounding.
        if not self._exact and (other_update := self._apart(self._after[step], _values(updaters))):
            raise _OtherUpdate(other_update)

    def _whole(self, start: _Values) -> Updater:
        optimizer = self._built(start)
        groups = optimizer.param_groups
        found = {name: each for own in groups for name, each in zip(own["param_names"], own["params"], strict=True)}
        for name in found.keys() - start.keys():
            # As those that another process updates: without memory, a step could not write to them.
            found[name].data = found[name].new_empty((0, *found[name].shape[1:]))
            found[name].grad = torch.empty_like(found[name]) if self.gradients and found[name].requires_grad else None
            for _, store in state_stores(optimizer):
                store.pop(found[name], None)
        return self._updater(optimizer, [(_all(name, value), found[name]) for name, value in start.items()])

    def _built(self, start: Mapping[str, Tensor], values: bool = True) -> torch.optim.Optimizer:
        return build(self._factory, self._parameters(start, values))

    def _parameters(self, start: Mapping[str, Tensor], values: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        for name, tensor in self._named:
            value = start.get(name, tensor)
            yield name, nn.Parameter(value.clone()) if values and name in start else _no_memory(value, tensor)

    def _updater(self, optimizer: torch.optim.Optimizer, owned: Sequence[tuple[Segment, Tensor]]) -> Updater:
        for group in optimizer.param_groups:
            if "lr" in group and group["lr"] is not None and not float(group["lr"]):
                group["lr"] = _SMALL_LR  # a run that warms up may begin with 0, and then nothing would move
            if group.get("capturable"):
                group["capturable"] = False  # says how it computes on an accelerator
        return Updater(optimizer, owned, Options(), 1)

    def _assign(self, updater: Updater, step: int, of: Sequence[str] | None = None) -> None:
        for segment, tensor in updater.owned:
            gradient = self._gradients[step][segment.parameter].flatten()[segment.start : segment.stop]
            wanted = of is None or segment.parameter in of
            tensor.grad = gradient.to(tensor.dtype, copy=True).view(tensor.shape) if wanted else None

    def _step(self, updater: Updater, step: int, of: Sequence[str] | None = None) -> None:
        self._assign(updater, step, of)
        updater.apply((), step)

    def _divided(self, cut: Callable[[_Values], list[list[Segment]]]) -> list[Updater]:
        """Makes the steps with an optimizer for each process, of which the last has nothing to update."""
        updaters = []
        for segments in (*cut(self._start), []):
            owned = [(each, _part(self._start[each.parameter], each)) for each in segments]
            optimizer, tensors = build_over(self._factory, self._parameters(self._start), owned, True, self.gradients)
            updaters.append(self._updater(optimizer, list(zip(segments, tensors, strict=True))))
        for step in range(len(_SCALES)):
            for updater in updaters:
                self._step(updater, step)
            self._require_same(updaters, step)
        return updaters

    def _in_two_calls(self) -> list[Updater]:
        updater, names = self._whole(self._start), list(self._start)
        for step in range(len(_SCALES)):
            for half in (names[::2], names[1::2]):
                self._step(updater, step, half)
            self._require_same([updater], step)
        return [updater]

    def _resumed(self, middle: _Values, pieces: Sequence[StatePiece], settings: Mapping[str, Any]) -> list[Updater]:
        updater = self._whole(middle)
        updater.load(pieces, settings)
        for step in range(_SAVED_AFTER, len(_SCALES)):
            self._step(updater, step)
        return [updater]

    def _reads_values(self) -> bool:
        """Tells whether the constructor makes something else of values than of zeros."""
        one, other = (self._built(self._start, values) for values in (True, False))
        if group_settings(one) != group_settings(other) or attributes(one) != attributes(other):
            return True
        states = [
            [tensor for _, store in first_state(each) for state in store.values() for tensor in tensors_of(state)]
            for each in (one, other)
        ]
        return len(states[0]) != len(states[1]) or not all(map(torch.equal, *states))


def _inside(start: _Values) -> list[list[Segment]]:
    """Divides every parameter between two processes; the first has two pieces of each."""
    every: list[list[Segment]] = [[], []]
    for name, value in start.items():
        ends = [0, value.numel() * 2 // 5, value.numel() * 4 // 5, value.numel()]
        for index, (low, high) in enumerate(pairwise(ends)):
            if low < high:
                every[index % 2].append(Segment(name, low, high, 0))
    return every


def _between(start: _Values) -> list[list[Segment]]:
    """Gives every second parameter to the one of two processes, the rest to the other."""
    every = [_all(name, value) for name, value in start.items()]
    return [every[::2], every[1::2]]


def _all(name: str, value: Tensor) -> Segment:
    return Segment(name, 0, value.numel(), 0)


def _part(value: Tensor, segment: Segment) -> Tensor:
    whole = segment.stop - segment.start == value.numel()
    return value.clone() if whole else value.flatten()[segment.start : segment.stop].clone()


def _values(updaters: Sequence[Updater]) -> _Values:
    """Returns copies of the parameters that several processes update pieces of."""
    owned = sorted((each for updater in updaters for each in updater.owned), key=lambda each: each[0].start)
    pieces: dict[str, list[Tensor]] = {}
    for segment, tensor in owned:
        pieces.setdefault(segment.parameter, []).append(tensor.detach().flatten())
    return {name: torch.cat(each) for name, each in pieces.items()}


def _kept(updater: Updater, tensor: Tensor) -> int:
    states = (store.get(tensor) for _, store in state_stores(updater.optimizer))
    return sum(each.numel() == tensor.numel() > 1 for state in states for each in tensors_of(state))


def _differing(settings: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns which number or text of two optimizers is not the same, "" if none."""
    for index, (mine, its) in enumerate(zip(settings["groups"], other["groups"], strict=True)):
        for key, value in mine["options"].items():
            if its["options"].get(key) != value:
                return f"{key!r} of its group {index}"
    mine, its = settings.get("attributes", {}), other.get("attributes", {})
    return next((f"its attribute {key!r}" for key in {**mine, **its} if mine.get(key) != its.get(key)), "")


def _no_memory(tensor: Tensor, like: Tensor | None = None) -> nn.Parameter:
    return stand_in(tensor.shape, tensor.dtype, torch.device("cpu"), (tensor if like is None else like).requires_grad)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
