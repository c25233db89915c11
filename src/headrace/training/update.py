"""The update verb, as the exchanges of all strategies share it: optimizer, schedule, moving average."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.internals import foreach_lerp_
from headrace.spec.options import Options
from headrace.spec.plan import Segment
from headrace.training.clipping import LossScale
from headrace.training.on_device.steps import place_steps
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
from headrace.training.user_code.attributes import attributes, set_attributes
from headrace.trees import holds_tensor, plain, restored

if TYPE_CHECKING:
    from headrace.training.on_device.found_inf import FoundInf


class Schedule:
    """Drives the options of an optimizer's groups.

    Attributes:
        factor: multiplies the learning rates beside schedule and warm-up.
        used: the learning rates of the last round, by group; [] where no schedule, warm-up or factor has changed them.
    """

    def __init__(self, options: Options, optimizer: torch.optim.Optimizer, rounds_per_epoch: int) -> None:
        self._optimizer = optimizer
        self._options = [set(group) for group in optimizer.param_groups]
        self.factor = 1.0
        self._warmup = options.warmup
        self._every = rounds_per_epoch if options.schedule_every == "epoch" else 1
        self._scheduler = make(options.schedule, optimizer) if options.schedule else None
        self.used: list[Any] = []

    def advance(self, round_: int) -> None:
        """Counts a round, whether or not its update was made."""
        if self._scheduler is not None or self._warmup or self.used or self.factor != 1.0:
            share = self.warmth(round_)
            self.used = [share * group["lr"] for group in self._optimizer.param_groups if "lr" in group]
        if self._scheduler is None or (round_ + 1) % self._every:
            return
        with warnings.catch_warnings():
            # It expects an optimizer.step() before its own, which may be skipped.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step", category=UserWarning)
            self._scheduler.step()

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
        groups = group_settings(self._optimizer)
        for group, begun in zip(groups, self._options, strict=True):
            if made := sorted(group["options"].keys() - begun):
                group["made"] = made
        settings = {"groups": groups, "schedule": state}
        return settings if self.factor == 1.0 else {**settings, "factor": self.factor}

    def load(self, settings: Mapping[str, Any]) -> None:
        """Loads what `settings` returned in a run with the same groups."""
        for group, saved in zip(self._optimizer.param_groups, settings["groups"], strict=True):
            # Only options that the class knows or a step has made, whatever a checkpoint holds.
            known = {*group, *saved.get("made", ())} & saved["options"].keys()
            known -= {"params", "param_names", *IMPLEMENTATION}
            group.update({key: restored(saved["options"][key]) for key in known})
        if self._scheduler is not None and settings["schedule"] is not None:
            self._scheduler.load_state_dict(restored(settings["schedule"]))
        self.factor = float(settings.get("factor", 1.0))


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
    # Of several pieces of a parameter, each has its name.
    names = [list(dict.fromkeys(group["param_names"])) for group in optimizer.param_groups]
    return [
        {
            "parameters": len(own),
            # A large model's names would fill the manifest of a checkpoint.
            "names": hashlib.sha256("\n".join(own).encode()).hexdigest()[:16],
            "options": dict(_options(group)),
        }
        for own, group in zip(names, optimizer.param_groups, strict=True)
    ]


def _options(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if key not in ("params", "param_names", *IMPLEMENTATION):
            with suppress(UsageError):
                yield key, plain(value, key)


AVERAGE = "headrace.average"
"""Key of the pieces that hold the moving average of the weights."""
PARAMETER = "headrace.parameter"
"""Key of the pieces that hold the weights themselves: they are loaded, never part of `state`."""
OURS = "headrace."
"""What the keys of pieces begin with that are no optimizer's."""


@runtime_checkable
class ScalesRates(Protocol):
    """An exchange whose ranks update the parameters at learning rates of their own."""

    def scale_rates(self, factor: float) -> None:
        """Multiplies the learning rates from the next round on, in the place of the factor before; all ranks call it.

        The factor is part of `settings`.
        """

    def learning_rates(self) -> Mapping[str, Any]:
        """Returns those of the last round, by the name of their curve; {} where they never change."""


@runtime_checkable
class HasModes(Protocol):
    """An optimizer that trains with other parameters than it evaluates with, as schedule-free ones do."""

    def train(self) -> Any: ...
    def eval(self) -> Any: ...


class Updater:
    """An optimizer together with the pieces of the parameters that this process updates.

    Args:
        optimizer: built over the tensors of `owned`; in its train mode from now on, if it has one.
        scale: of the loss, kept with the rest of the state; None for none.
        idle: whether the optimizer makes no steps, because others update all that it looks at.
        found: masks updates on the device; None where the host decides before each.

    Attributes:
        parameters: the tensors of `owned`.
        patched: whether the optimizer came with a `step` of its own in place of its class's.
        schedule: of the learning rates.
        averages: the moving averages, by index in `owned`.
        swapped: whether they, or what the optimizer evaluates with, are in the parameters' place.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        owned: Sequence[tuple[Segment, Tensor]],
        options: Options,
        rounds_per_epoch: int,
        scale: LossScale | None = None,
        idle: bool = False,
        found: FoundInf | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._idle = idle
        self._found = found
        self.owned = tuple(owned)
        self.parameters: list[Any] = [tensor for _, tensor in owned]
        # A schedule puts its own there.
        self.patched = "step" in vars(optimizer)
        if found is not None and not self.patched:
            found.of(optimizer, self.parameters)
        self.schedule = Schedule(options, optimizer, rounds_per_epoch)
        self._tensors = [tensor.detach() for _, tensor in owned]
        self._modes = optimizer if isinstance(optimizer, HasModes) else None
        # Some cannot enter the mode that they are in.
        if self._modes and not all(group.get("train_mode") for group in optimizer.param_groups):
            self._modes.train()
        self._first_state = first_state(optimizer)
        self._first_attributes = attributes(optimizer)
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
        if self._idle:
            return
        masked = self._found if self._found is not None and self._found.tensor is not None else None
        with self.schedule.warmed(round_, factor):
            masked.step(self.optimizer) if masked else self.optimizer.step()
        # An average that begins with a round's result needs to know whether there is one.
        if self._decay is None or (masked and len(self.averages) < len(self.owned) and masked.is_bad()):
            return
        known = [index for index in indices if index in self.averages]
        # As torch's AveragedModel: the average begins with the first update's result.
        self.averages |= {index: self._tensors[index].clone() for index in indices if index not in self.averages}
        if known:
            averages, tensors = [self.averages[i] for i in known], [self._tensors[i] for i in known]
            if masked:
                masked.average(averages, tensors, weight=1 - self._decay**share)
            else:
                foreach_lerp_(averages, tensors, 1 - self._decay**share)

    def descend(self, gradients: Sequence[tuple[int, Tensor]], round_: int, factor: float) -> bool:
        """Applies plain SGD to some pieces without torch's optimizer, which takes ten times as long for small ones.

        `gradients` are pairs of an index in `owned` and a gradient. Returns whether the optimizer is plain SGD; else
        nothing has been done.
        """
        if self._decay is not None or self.patched or not is_plain_sgd(self.optimizer):
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
        if self._modes and self._decay is None:
            self._modes.eval() if averaged else self._modes.train()
        for index, average in self.averages.items():
            tensor = self._tensors[index]
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)

    def state(self, index: int | None = None, copies: bool = True) -> tuple[StatePiece, ...]:
        """Returns the optimizer's state and the moving averages, of all or one; without `copies` they are in place."""
        indices = range(len(self.owned)) if index is None else (index,)
        owned = [self.owned[each] for each in indices]
        kept = (
            StatePiece.of(segment.parameter, AVERAGE, segment.start, self.averages[each], copies)
            for each, (segment, _) in zip(indices, owned, strict=True) if each in self.averages
        )  # fmt: skip
        return (*state_pieces(self.optimizer, owned, copies), *kept, *self._evaluated(owned))

    def _evaluated(self, owned: Sequence[tuple[Segment, Tensor]]) -> Iterator[StatePiece]:
        """Yields the parameters that the optimizer evaluates with, which an exported checkpoint has."""
        if not self._modes or self._decay is not None or self.swapped:
            return
        # In memory of its own: what is trained may be shared with processes that read it meanwhile. A device has no
        # room for that, and shares nothing: what it trains waits in host memory.
        trained = [tensor.data for tensor in self.parameters]
        apart = [each.clone() if each.device.type == HOST else each.cpu() for each in trained]
        for tensor, copy in zip(self.parameters, apart, strict=True):
            tensor.data = copy if tensor.device.type == HOST else tensor.data
        self._modes.eval()
        for segment, tensor in owned:
            yield StatePiece(segment.parameter, AVERAGE, segment.start, tensor.detach().flatten().to(HOST, copy=True))
        self._modes.train()
        for tensor, place, copy in zip(self.parameters, trained, apart, strict=True):
            tensor.data = place if place.device.type == HOST else place.copy_(copy)

    def load(
        self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None, index: int | None = None
    ) -> None:
        """Loads what belongs to the owned pieces, or to one of them, and `settings` if given."""
        every = tuple(pieces)
        indices = range(len(self.owned)) if index is None else (index,)
        owned = [self.owned[each] for each in indices]
        theirs = (piece for piece in every if not piece.key.startswith(OURS))
        load_state(self.optimizer, owned, theirs, self._first_state)
        place_steps(self.optimizer)
        self._load_averages(indices, [piece for piece in every if piece.key == AVERAGE])
        self._fill(indices, self._tensors, [piece for piece in every if piece.key == PARAMETER])
        if settings is not None:
            self.load_settings(settings)

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Loads what `settings` returned."""
        self.schedule.load(settings)
        now = attributes(self.optimizer)
        # Settings do not have what was as the constructor had made it.
        unlike = {name: value for name, value in self._first_attributes.items() if now.get(name) != value}
        set_attributes(self.optimizer, {**unlike, **settings.get("attributes", {})})
        if self._scale is not None and settings["scale"] is not None:
            self._scale.load(settings["scale"])

    def settings(self) -> dict[str, Any]:
        """Returns the state that is no tensor, the same on every rank, as JSON values."""
        every, first = attributes(self.optimizer), self._first_attributes
        # What a constructor makes of values is another thing where it makes it again.
        changed = {name: each for name, each in every.items() if first.get(name) != each or holds_tensor(each)}
        settings = {**self.schedule.settings(), "scale": None if self._scale is None else self._scale.settings()}
        return {**settings, "attributes": changed} if changed else settings

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
