"""The update verb, as the exchanges of all strategies share it: optimizer, schedule, moving average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.spec.options import Options
from headrace.spec.plan import Segment
from headrace.training.exchange import Exchange
from headrace.training.loss_scale import LossScale
from headrace.training.optimizer import is_plain_sgd, load_state, state_bytes, state_pieces
from headrace.training.schedule import Schedule
from headrace.training.state_piece import StatePiece

AVERAGE = "headrace.average"
"""Key of the pieces that hold the moving average of the weights."""
PARAMETER = "headrace.parameter"
"""Key of the pieces that hold the weights themselves: they are loaded, never part of `state`."""
_OURS = "headrace."
"""What the keys of pieces begin with that are no optimizer's."""


class Updater:
    """An optimizer together with the pieces of the parameters that this process updates.

    Args:
        optimizer: built over the tensors of `owned`.
        owned: the pieces, in the plan's order.
        options: schedule, warm-up and moving average.
        rounds_per_epoch: for schedules that go by epochs.
        template: over whole parameters, where `optimizer` is over pieces.
        scale: of the loss, kept with the rest of the state; None for none.
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
        self._owned = tuple(owned)
        self._schedule = Schedule(options, template or optimizer, optimizer, rounds_per_epoch)
        self._tensors = [tensor.detach() for _, tensor in owned]
        groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
        self._groups = [groups.get(id(tensor), {}) for _, tensor in owned]
        self._scale = scale
        self._decay = options.ema_decay
        self._averages: dict[int, Tensor] = {}
        self.shows_average = False

    def step(self, round_: int) -> None:
        """Applies the optimizer once."""
        self.apply(range(len(self._tensors)), round_)
        self._schedule.advance(round_)

    def apply(self, indices: Sequence[int], round_: int, share: float = 1.0, factor: float = 1.0) -> None:
        """Applies the optimizer to some pieces, those alone that have gradients; the schedule stays where it is.

        Args:
            indices: which of `owned`.
            round_: that it belongs to.
            share: of the round that the gradients stand for, as far as the moving average goes.
            factor: of the learning rates.
        """
        with self._schedule.warmed(round_, factor):
            self.optimizer.step()
        if self._decay is None:
            return
        known = [index for index in indices if index in self._averages]
        # As torch's AveragedModel: the average begins with the first update's result.
        self._averages |= {index: self._tensors[index].clone() for index in indices if index not in self._averages}
        if known:
            averages, tensors = [self._averages[i] for i in known], [self._tensors[i] for i in known]
            torch._foreach_lerp_(averages, tensors, 1 - self._decay**share)

    def descend(self, gradients: Sequence[tuple[int, Tensor]], round_: int, factor: float) -> bool:
        """Applies plain SGD to some pieces without torch's optimizer, which takes ten times as long for small ones.

        Args:
            gradients: index in `owned` and gradient.
            round_, factor: as in `apply`.

        Returns:
            Whether the optimizer is plain SGD; else nothing has been done.
        """
        if self._decay is not None or not is_plain_sgd(self.optimizer):
            return False
        factor *= self._schedule.warmth(round_)
        for index, gradient in gradients:
            self._tensors[index].add_(gradient, alpha=-factor * self._groups[index]["lr"])
        return True

    def skip(self, round_: int) -> None:
        """Ends a round without an update, or one whose updates were made piece by piece: the schedule counts rounds."""
        self._schedule.advance(round_)

    def show_average(self, on: bool) -> None:
        """Lets the moving averages stand where the parameters do, or the parameters again."""
        if on == self.shows_average:
            return
        self.shows_average = on
        for index, average in self._averages.items():
            tensor = self._tensors[index]
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)

    def state(self, index: int | None = None) -> tuple[StatePiece, ...]:
        """Returns the optimizer's state and the moving averages, of all pieces or of one."""
        indices = range(len(self._owned)) if index is None else (index,)
        owned = [self._owned[each] for each in indices]
        averages = (
            StatePiece(segment.parameter, AVERAGE, segment.start, self._averages[each].detach().flatten().clone())
            for each, (segment, _) in zip(indices, owned, strict=True)
            if each in self._averages
        )
        return (*state_pieces(self.optimizer, owned), *averages)

    def load(
        self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None, index: int | None = None
    ) -> None:
        """Takes up what belongs to the owned pieces, or to one of them, and `settings` if there are some."""
        every = tuple(pieces)
        indices = range(len(self._owned)) if index is None else (index,)
        owned = [self._owned[each] for each in indices]
        load_state(self.optimizer, owned, (piece for piece in every if not piece.key.startswith(_OURS)))
        self._load_averages(indices, [piece for piece in every if piece.key == AVERAGE])
        self._fill(indices, self._tensors, [piece for piece in every if piece.key == PARAMETER])
        if settings is not None:
            self._schedule.load(settings)
            if self._scale is not None and settings["scale"] is not None:
                self._scale.load(settings["scale"])

    def settings(self) -> dict[str, Any]:
        """Returns the state that is no tensor, the same on every rank, as JSON values."""
        return {**self._schedule.settings(), "scale": None if self._scale is None else self._scale.settings()}

    def state_bytes(self) -> int:
        """Returns the bytes of the optimizer's state and of the averages."""
        averages = sum(average.numel() * average.element_size() for average in self._averages.values())
        return state_bytes(self.optimizer) + averages

    def _load_averages(self, indices: Sequence[int], pieces: Sequence[StatePiece]) -> None:
        if self._decay is None:
            return
        # Before the first update there is none.
        for index in indices:
            self._averages.pop(index, None)
        if pieces:
            self._averages |= {index: self._tensors[index].clone() for index in indices}
            self._fill(indices, self._averages, pieces)

    def _fill(
        self, indices: Sequence[int], tensors: Sequence[Tensor] | Mapping[int, Tensor], pieces: Sequence[StatePiece]
    ) -> None:
        by_parameter: dict[str, list[StatePiece]] = {}
        for piece in pieces:
            by_parameter.setdefault(piece.parameter, []).append(piece)
        for index in indices:
            segment, tensor = self._owned[index][0], tensors[index]
            if segment.parameter in by_parameter:
                dense = tensor.contiguous()  # a model in channels-last order has others
                for piece in by_parameter[segment.parameter]:
                    piece.copy_to(dense, segment.start)
                if dense is not tensor:
                    tensor.copy_(dense)


class UpdatingExchange(Exchange):
    """An exchange whose rank itself updates what it owns.

    Attributes:
        updater: of the pieces that this rank owns.
        parameter_bytes: what this rank adds to the host for parameters.
    """

    updater: Updater
    parameter_bytes: int

    def update(self, round_: int) -> None:
        self.updater.step(round_)

    def skip(self, round_: int) -> None:
        self.updater.skip(round_)

    def show_average(self, on: bool) -> None:
        self.updater.show_average(on)

    def state(self) -> tuple[StatePiece, ...]:
        return self.updater.state()

    def settings(self) -> dict[str, Any]:
        return self.updater.settings()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self.updater.load(pieces, settings)

    def memory(self) -> tuple[int, int]:
        return self.parameter_bytes, self.updater.state_bytes()
