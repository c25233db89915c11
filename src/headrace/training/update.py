"""The update verb, as the exchanges of all strategies share it: optimizer, schedule, moving average."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headrace.errors import UsageError
from headrace.internals import foreach_lerp_
from headrace.spec.options import Options
from headrace.spec.plan import Segment
from headrace.training.clipping import LossScale
from headrace.training.optimizer import (
    IMPLEMENTATION,
    StatePiece,
    by_parameter,
    first_state,
    is_plain_sgd,
    load_state,
    state_bytes,
    state_pieces,
)


class Schedule:
    """Drives the options of an optimizer's groups, and copies them to the optimizer that owns the pieces.

    A scheduler needs all groups of the job, and an optimizer over pieces may have only some of them. So the scheduler
    drives `template`, which has all of them, by name.

    Attributes:
        factor: multiplies the learning rates beside schedule and warm-up.
    """

    def __init__(
        self, options: Options, template: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, rounds_per_epoch: int
    ) -> None:
        self._template = template
        self._optimizer = optimizer
        self.factor = 1.0
        self._warmup = options.warmup
        self._every = rounds_per_epoch if options.schedule_every == "epoch" else 1
        self._scheduler = make(options.schedule, template) if options.schedule else None
        self._spread()

    def advance(self, round_: int) -> None:
        """Counts a round, whether or not its update was made."""
        if self._scheduler is None or (round_ + 1) % self._every:
            return
        with warnings.catch_warnings():
            # It expects an optimizer.step() before its own; that of the pieces is another one, and may be skipped.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step", category=UserWarning)
            self._scheduler.step()
        self._spread()

    def warmth(self, round_: int) -> float:
        """Returns the share of the learning rates that warm-up and `factor` allow a round."""
        return self.factor * ((round_ + 1) / self._warmup if round_ < self._warmup else 1.0)

    @contextmanager
    def warmed(self, round_: int, factor: float = 1.0) -> Iterator[None]:
        """Multiplies the learning rates by the share of warm-up and `factor` for one round."""
        factor *= self.warmth(round_)
        if factor == 1.0:
            yield
            return
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def settings(self) -> dict[str, Any]:
        """Returns the groups and the scheduler's state as JSON values."""
        state = None if self._scheduler is None else plain(self._scheduler.state_dict(), "the schedule's state")
        settings = {"groups": group_settings(self._template), "schedule": state}
        return settings if self.factor == 1.0 else {**settings, "factor": self.factor}

    def load(self, settings: Mapping[str, Any]) -> None:
        """Loads what `settings` returned in a run with the same groups."""
        for group, saved in zip(self._template.param_groups, settings["groups"], strict=True):
            # Only options that the class knows, whatever a checkpoint holds.
            known = (group.keys() & saved["options"].keys()) - {"params", "param_names", *IMPLEMENTATION}
            group.update({key: _restored(saved["options"][key]) for key in known})
        if self._scheduler is not None and settings["schedule"] is not None:
            self._scheduler.load_state_dict(_restored(settings["schedule"]))
        self.factor = float(settings.get("factor", 1.0))
        self._spread()

    def _spread(self) -> None:
        if self._optimizer is self._template:
            return
        by_names = {tuple(group["param_names"]): group for group in self._template.param_groups}
        for group in self._optimizer.param_groups:
            source = by_names.get(tuple(group.get("param_names", ())))
            if source is not None:
                group.update({key: source[key] for key in source if key not in ("params", "param_names")})


def make(factory: Callable[..., Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Calls the job's schedule with an optimizer; refuses one that needs a metric, or that drives another optimizer."""
    scheduler = factory(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau follows a metric, not rounds or epochs; use a schedule that does (CosineAnnealingLR, "
            "StepLR), or Options(early_stopping=...)"
        )
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"the schedule must return a torch.optim.lr_scheduler.LRScheduler, got {type(scheduler).__name__}; "
            "for example schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)"
        )
    if scheduler.optimizer is not optimizer:
        raise UsageError("the schedule drives another optimizer than the one that it was given; make it from that one")
    return scheduler


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns an optimizer's groups, a digest of their parameters' names and their options, as JSON values.

    An option of another type is left to the job's optimizer factory.
    """
    return [
        {
            "parameters": len(group["param_names"]),
            # A large model's names would fill the manifest of a checkpoint.
            "names": hashlib.sha256("\n".join(group["param_names"]).encode()).hexdigest()[:16],
            "options": dict(_options(group)),
        }
        for group in optimizer.param_groups
    ]


def _options(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if key not in ("params", "param_names", *IMPLEMENTATION):
            with suppress(UsageError):
                yield key, plain(value, key)


def plain(value: Any, what: str) -> Any:
    """Returns a value of a scheduler or optimizer as JSON values that `load` restores exactly.

    Raises a `UsageError` if it holds something that is no number, text or collection of them.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # As text, because infinity is no JSON number.
        return {"float": repr(float(value))}
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"tensor": plain(value.item(), what), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [plain(item, what) for item in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[plain(key, what), plain(item, what)] for key, item in value.items()]}
    raise UsageError(f"{what} holds a {type(value).__name__}, which a checkpoint cannot keep; use plain numbers")


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = ((key, item) for key, item in value.items() if key != "dtype")
    if kind == "float":
        return float(inner)
    if kind == "tensor":
        return torch.tensor(_restored(inner), dtype=getattr(torch, value["dtype"]))
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](_restored(item) for item in inner)
    pairs = {_restored(key): _restored(item) for key, item in inner}
    return Counter(pairs) if kind == "counter" else pairs


AVERAGE = "headrace.average"
"""Key of the pieces that hold the moving average of the weights."""
PARAMETER = "headrace.parameter"
"""Key of the pieces that hold the weights themselves: they are loaded, never part of `state`."""
_OURS = "headrace."
"""What the keys of pieces begin with that are no optimizer's."""


@runtime_checkable
class ScalesRates(Protocol):
    """An exchange whose ranks update the parameters at learning rates of their own."""

    def scale_rates(self, factor: float) -> None:
        """Multiplies the learning rates from the next round on, in the place of the factor before; all ranks call it.

        The factor is part of `settings`.
        """


class Updater:
    """An optimizer together with the pieces of the parameters that this process updates.

    Args:
        optimizer: built over the tensors of `owned`.
        template: over whole parameters, where `optimizer` is over pieces.
        scale: of the loss, kept with the rest of the state; None for none.

    Attributes:
        schedule: of the learning rates.
        averages: the moving averages, by index in `owned`.
        swapped: whether they are in the parameters' place.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        owned: Sequence[tuple[Segment, Tensor]],
        options: Options,
        rounds_per_epoch: int,
        template: torch.optim.Optimizer | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.owned = tuple(owned)
        self.schedule = Schedule(options, template or optimizer, optimizer, rounds_per_epoch)
        self._tensors = [tensor.detach() for _, tensor in owned]
        self._first_state = first_state(optimizer)
        groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
        self._groups = [groups.get(id(tensor), {}) for _, tensor in owned]
        self._scale = scale
        self._decay = options.ema_decay
        self.averages: dict[int, Tensor] = {}
        self.swapped = False

    def step(self, round_: int) -> None:
        """Applies the optimizer once."""
        self.apply(range(len(self._tensors)), round_)
        self.schedule.advance(round_)

    def apply(self, indices: Sequence[int], round_: int, share: float = 1.0, factor: float = 1.0) -> None:
        """Applies the optimizer to those of some pieces that have gradients; the schedule does not advance.

        `indices` are those of `owned`; `share` is the part of a round that the gradients are of.
        """
        with self.schedule.warmed(round_, factor):
            self.optimizer.step()
        if self._decay is None:
            return
        known = [index for index in indices if index in self.averages]
        # As torch's AveragedModel: the average begins with the first update's result.
        self.averages |= {index: self._tensors[index].clone() for index in indices if index not in self.averages}
        if known:
            averages, tensors = [self.averages[i] for i in known], [self._tensors[i] for i in known]
            foreach_lerp_(averages, tensors, 1 - self._decay**share)

    def descend(self, gradients: Sequence[tuple[int, Tensor]], round_: int, factor: float) -> bool:
        """Applies plain SGD to some pieces without torch's optimizer, which takes ten times as long for small ones.

        `gradients` are pairs of an index in `owned` and a gradient. Returns whether the optimizer is plain SGD; else
        nothing has been done.
        """
        if self._decay is not None or not is_plain_sgd(self.optimizer):
            return False
        factor *= self.schedule.warmth(round_)
        for index, gradient in gradients:
            self._tensors[index].add_(gradient, alpha=-factor * self._groups[index]["lr"])
        return True

    def skip(self, round_: int) -> None:
        """Ends a round without an update, or one whose updates were made piece by piece: the schedule counts rounds."""
        self.schedule.advance(round_)

    def swap_weights(self, averaged: bool) -> None:
        """Puts the moving averages in the parameters' place, or the parameters back."""
        if averaged == self.swapped:
            return
        self.swapped = averaged
        for index, average in self.averages.items():
            tensor = self._tensors[index]
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)

    def state(self, index: int | None = None, copies: bool = True) -> tuple[StatePiece, ...]:
        """Returns the optimizer's state and the moving averages, of all pieces or of one.

        Without `copies` the next update changes it.
        """
        indices = range(len(self.owned)) if index is None else (index,)
        owned = [self.owned[each] for each in indices]
        averages = ((segment, self.averages[each].detach().flatten())
                    for each, (segment, _) in zip(indices, owned, strict=True) if each in self.averages)  # fmt: skip
        kept = (
            StatePiece(segment.parameter, AVERAGE, segment.start, average.clone() if copies else average)
            for segment, average in averages
        )
        return (*state_pieces(self.optimizer, owned, copies), *kept)

    def load(
        self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None, index: int | None = None
    ) -> None:
        """Loads what belongs to the owned pieces, or to one of them, and `settings` if given."""
        every = tuple(pieces)
        indices = range(len(self.owned)) if index is None else (index,)
        owned = [self.owned[each] for each in indices]
        theirs = (piece for piece in every if not piece.key.startswith(_OURS))
        load_state(self.optimizer, owned, theirs, self._first_state)
        self._load_averages(indices, [piece for piece in every if piece.key == AVERAGE])
        self._fill(indices, self._tensors, [piece for piece in every if piece.key == PARAMETER])
        if settings is not None:
            self.load_settings(settings)

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Loads what `settings` returned."""
        self.schedule.load(settings)
        if self._scale is not None and settings["scale"] is not None:
            self._scale.load(settings["scale"])

    def settings(self) -> dict[str, Any]:
        """Returns the state that is no tensor, the same on every rank, as JSON values."""
        return {**self.schedule.settings(), "scale": None if self._scale is None else self._scale.settings()}

    def state_bytes(self) -> int:
        """Returns the bytes of the optimizer's state and of the averages."""
        averages = sum(average.numel() * average.element_size() for average in self.averages.values())
        return state_bytes(self.optimizer) + averages

    def _load_averages(self, indices: Sequence[int], pieces: Sequence[StatePiece]) -> None:
        if self._decay is None:
            return
        # Before the first update there are none.
        for index in indices:
            self.averages.pop(index, None)
        if pieces:
            self.averages |= {index: self._tensors[index].clone() for index in indices}
            self._fill(indices, self.averages, pieces)

    def _fill(
        self, indices: Sequence[int], tensors: Sequence[Tensor] | Mapping[int, Tensor], pieces: Sequence[StatePiece]
    ) -> None:
        found = by_parameter(pieces)
        for index in indices:
            segment, tensor = self.owned[index][0], tensors[index]
            if segment.parameter in found:
                for piece in found[segment.parameter]:
                    piece.copy_to(tensor, segment.start)
