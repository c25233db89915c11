"""The exchange of workers in lock-step whose gradients become one by a rule of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.aggregation.gradients import GradientAggregation, WorkerGroup
from headrace.collectives.base import ProcessGroup
from headrace.errors import RunFailed, UsageError
from headrace.spec.options import Options
from headrace.training.clipping import GradientClipper, StepDecision, all_finite
from headrace.training.exchange import UpdatingExchange
from headrace.training.gradients import UsedParameters, assign
from headrace.training.optimizer import StatePiece
from headrace.training.update import Updater

_PREFIX = "headrace.aggregation."
"""What keys of the pieces of a rule's state begin with: an optimizer's own may have any other name."""


class AggregatingExchange(UpdatingExchange):
    """Checks each worker's gradients, has the rule make one of all, clips that, and updates every worker's mirror.

    Args:
        rule: makes one gradient of all.
        updater: of all trainable parameters.
        named: the trainable parameters, in order.
        options: the job's.
        workers, group: as the rule and as the checks reach the others.
        seed: of what the rule draws.
        parameter_bytes: what this rank adds to the host for parameters.
    """

    def __init__(
        self,
        rule: GradientAggregation,
        updater: Updater,
        named: Mapping[str, nn.Parameter],
        options: Options,
        workers: WorkerGroup,
        group: ProcessGroup,
        seed: int,
        parameter_bytes: int,
    ) -> None:
        self.updater, self.parameter_bytes = updater, parameter_bytes
        self._rule, self._named, self._options, self._workers, self._group = rule, named, options, workers, group
        # What is clipped is the same on all workers, so that each clips for itself.
        self._checker = GradientClipper(replace(options, clip_norm=None, clip_value=None), group)
        self._used = UsedParameters(group, len(named))
        self.state_keys = tuple(_PREFIX + name for name in (*rule.own_state, *rule.common_state))
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        expected = {*self._rule.own_state, *self._rule.common_state}
        self._state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._named.items():
            state = dict(self._rule.begin(parameter.new_zeros(parameter.shape), generator))
            if state.keys() != expected:
                raise UsageError(
                    f"{type(self._rule).__name__}.begin() returned state of the names {sorted(state)}, and own_state "
                    f"and common_state say {sorted(expected)}"
                )
            self._state[name] = state

    def begin(self, round_: int) -> None:
        self.updater.optimizer.zero_grad()

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        every = list(self._named.values())
        gradients = [each.grad for each in every]
        self._used.publish(gradients)
        missing = self._used.settle()
        # A rule need not know what the mean or the largest of no element is, nor of other orders in memory.
        present = [index for index, each in enumerate(every) if index not in missing and each.numel()]
        own = [
            each.contiguous() if (each := gradients[index]) is not None else every[index].new_zeros(every[index].shape)
            for index in present
        ]
        # Before the rule sees them: what is not finite would stay in its state.
        decision = self._checker.clip(own, own, finite)
        if decision.apply:
            self._workers.idle = all(each is None for each in gradients)
            states = list(self._state.values())
            made = self._aggregated(own, [states[index] for index in present])
            assign([every[index] for index in present], made)
            self._clip(every)
        return decision

    def state(self) -> tuple[StatePiece, ...]:
        self._require_common()
        return (*super().state(), *self._pieces(self._rule.common_state))

    def own(self) -> tuple[StatePiece, ...]:
        return self._pieces(self._rule.own_state)

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = tuple(pieces)
        super().load(every, settings)
        for piece in every:
            if piece.key in self.state_keys:
                kept = self._state[piece.parameter][piece.key.removeprefix(_PREFIX)]
                kept.copy_(piece.value.view(kept.shape))

    def memory(self) -> tuple[int, int]:
        parameters, state = super().memory()
        return parameters, state + sum(each.nbytes for kept in self._state.values() for each in kept.values())

    @torch.no_grad()
    def _aggregated(self, gradients: list[Tensor], state: list[dict[str, Tensor]]) -> Sequence[Tensor]:
        rule = type(self._rule).__name__
        shapes = [(each.shape, each.dtype) for each in gradients]
        kept = [{name: each.shape for name, each in one.items()} for one in state]
        made = self._rule.aggregate(gradients, state, self._workers)
        found = [(each.shape, each.dtype) for each in made]
        if found != shapes:
            raise UsageError(
                f"{rule}.aggregate() was given gradients of {_shown(shapes)} and returned {_shown(found)}; it "
                "returns one for each, of the same shape and type"
            )
        if [{name: each.shape for name, each in one.items()} for one in state] != kept:
            raise UsageError(
                f"{rule}.aggregate() has changed the names or shapes of its state; these stay as begin() has"
            )
        if not all_finite(made):
            raise RunFailed(
                f"{rule}.aggregate() made gradients that are not finite of gradients that are; check what it divides by"
            )
        return made

    def _require_common(self) -> None:
        """Raises UsageError where what is saved once for all is not the same on all; every worker calls it."""
        for name in self._rule.common_state:
            kept = [each[name].double() for each in self._state.values()]
            every = self._group.gather_numbers([float(sum(x.sum() for x in kept)), float(sum(x.norm() for x in kept))])
            apart = [rank for rank, sums in enumerate(every) if sums != every[0]]
            if apart:
                raise UsageError(
                    f"{type(self._rule).__name__} says that {name!r} is the same on all workers (common_state), and "
                    f"that of rank {apart[0]} is not rank 0's; name it in own_state, and each worker has its own again"
                )

    def _clip(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._options.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self._options.clip_value)
        if self._options.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._options.clip_norm)

    def _pieces(self, names: Sequence[str]) -> tuple[StatePiece, ...]:
        # Whole, because their shapes are the rule's, and not the parameter's.
        return tuple(
            StatePiece.of(parameter, _PREFIX + name, -1, kept[name])
            for parameter, kept in self._state.items()
            for name in names
        )


def _shown(shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes[:4]) or "none"
