"""What happens to the summed gradients before the update: unscaled, checked and clipped, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.internals import foreach_mul_
from headrace.spec.options import Options

_START, _GROWTH, _BACKOFF, _GROWTH_EVERY = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """The loss scale of fp16: gradients that would vanish in half precision are computed larger, and shrunk again.

    Micikevicius et al., "Mixed precision training" (2018), section 3.2, with torch's `GradScaler` defaults. torch's
    own decides per process; here all ranks take the same decision from the same sum, so their scales never differ.

    `value` is on the device where the host does not wait for decisions: `()` float32.
    """

    def __init__(self) -> None:
        self.value: float | Tensor = _START
        self._good: int | Tensor = 0

    @property
    def inverse(self) -> float | Tensor:
        """What the gradients are multiplied by."""
        return 1.0 / self.value

    def follow(self, bad: Tensor) -> Tensor:
        """Notes a round of which the device alone knows whether its gradients overflowed; returns the new value."""
        value, good = torch.as_tensor(self.value, device=bad.device), torch.as_tensor(self._good, device=bad.device) + 1
        grown = good == _GROWTH_EVERY
        self.value = torch.where(bad, value * _BACKOFF, torch.where(grown, value * _GROWTH, value))
        self._good = torch.where(bad | grown, 0, good)
        return self.value

    def grow(self) -> None:
        """Notes a round whose gradients were finite."""
        self._good += 1
        if self._good == _GROWTH_EVERY:
            self.value, self._good = self.value * _GROWTH, 0

    def shrink(self) -> None:
        """Notes a round whose gradients overflowed."""
        self.value, self._good = self.value * _BACKOFF, 0

    def settings(self) -> dict[str, float]:
        """Returns the state as JSON values."""
        return {"value": float(self.value), "good": int(self._good)}

    def load(self, settings: Mapping[str, float]) -> None:
        """Loads what `settings` returned."""
        self.value, self._good = float(settings["value"]), int(settings["good"])


@dataclass(frozen=True)
class StepDecision:
    """What all ranks have decided together about one round.

    `overflow` tells whether gradients are infinite only because of the loss scale, which is about to shrink. Where the
    host does not wait for the decision, `apply` is True, the device skips the update, and `record` has what `of` reads:
    `(3,)` float64, the ranks whose loss is not finite, whether a gradient is not, the new loss scale.
    """

    apply: bool = True
    bad_losses: tuple[int, ...] = ()
    overflow: bool = False
    record: Tensor | None = None

    @classmethod
    def of(cls, bad: float, broken: float, scale: float | None) -> StepDecision:
        """Returns the decision of a round, where there is a loss scale with what it has become."""
        if not bad and not broken:
            return HEALTHY
        bad_losses = tuple(rank for rank in range(64) if int(bad) >> rank & 1)
        # A scale below 1 makes gradients smaller than they are, so it does not cause their overflow.
        return cls(False, bad_losses, overflow=scale is not None and not bad_losses and scale >= 1.0)


HEALTHY = StepDecision()


class DecidesThere(Protocol):
    """What a `GradientClipper` decides by where the gradients lie on an accelerator: `on_device/clipping.py`."""

    @property
    def masks(self) -> bool:
        """Whether the device leaves out the update of a round that is not finite."""

    def record(self, measured: Sequence[Tensor], finite: bool | Tensor) -> Tensor:
        """Returns `(3,)` float64, the same on all ranks: bad losses, whether a gradient is bad, the squared norm."""

    def decide(self, record: Tensor, measured: Sequence[Tensor], held: Sequence[Tensor]) -> StepDecision:
        """Clips, and returns a decision to be read later."""


class GradientClipper:
    """Checks and clips this rank's pieces of the summed gradient, and decides with the others.

    The pieces are those of the exchange: a slice on each rank, or everything on rank 0 where all hold the same. If
    `immediate`, it checks every round; on an accelerator that means to wait for it each time. Where each of `times`
    ranks holds slices of one of `stages`, `repeated` returns the gradients that all of them hold. `there` decides on an
    accelerator, where the host is not to wait.
    """

    def __init__(
        self,
        options: Options,
        group: ProcessGroup,
        scale: LossScale | None = None,
        immediate: bool = True,
        repeated: Callable[[], Sequence[Tensor]] = tuple,
        times: int = 1,
        stages: int = 1,
        there: DecidesThere | None = None,
    ) -> None:
        self._there = there
        self._action = options.on_nonfinite
        self._repeated = repeated
        self._times, self._stages = times, stages
        self._clip_norm = options.clip_norm
        self._clip_value = options.clip_value
        self._group = group
        self._scale = scale
        self._votes = False
        self._meets = True
        self.checks = immediate or scale is not None or options.on_nonfinite != "raise" or self._clip_norm is not None

    @property
    def defers(self) -> bool:
        """Whether decisions stay on the device, for `clip` with a `finite` that is there, too."""
        if self._there is None or not self.checks or self._action == "rollback":
            return False
        # After a round that is not finite, the run ends, or its update must not have been made.
        return (self._action == "raise" and self._scale is None) or self._there.masks

    def allow_votes(self) -> None:
        """Lets ranks that all hold the whole sum end the step with the decision, where the group votes.

        Then each decides for itself, and all alike, unless a loss or the gradient is not finite.
        """
        plain = self._scale is None and self._clip_norm is None and self._clip_value is None
        self._votes = self._group.votes and plain

    def leave_meeting_to(self, group: ProcessGroup) -> None:
        """Does without a barrier where nothing is decided, because the exchange has all of these ranks meet later."""
        self._meets = group is not self._group

    def clip(self, measured: Sequence[Tensor], held: Sequence[Tensor], finite: bool | Tensor) -> StepDecision:
        """Decides, and clips. When it returns, every rank has, or the device will have.

        All ranks' `measured` together hold every element once, except those of `repeated`.
        """
        if self._votes and self._group.commit(not self.checks or (bool(finite) and all_finite(held))):
            return HEALTHY
        if not self.checks:
            self._clamp(held)
            if self._meets:
                self._group.barrier()
            return HEALTHY
        if self._there is not None:
            record = self._there.record(measured, finite)
            if isinstance(finite, Tensor):
                return self._there.decide(record, measured, held)
            bad, broken, squared = record.tolist()
        else:
            # A power of two for each rank: the sum tells which ranks they are, exactly for the first fifty.
            own = 0.0 if finite else 2.0 ** min(self._group.rank, 50)
            bad, broken, squared = self._group.sum([own, *self._check(measured)])
        if bad or broken:
            if self._scale is not None:
                self._scale.shrink()
            return StepDecision.of(bad, broken, None if self._scale is None else float(self._scale.value))
        unscale = 1.0 if self._scale is None else float(self._scale.inverse)
        if self._clip_value is not None:
            _multiply(held, unscale)
            self._clamp(held)
            if self._clip_norm is None:
                self._group.barrier()
                return self._accept()
            self._group.barrier()
            (squared,), unscale = self._group.sum([squared_norm(measured)]), 1.0
        if self._clip_norm is not None:
            unscale *= clip_coefficient(self._clip_norm, self._counted_once(squared) * unscale**2)
        if unscale != 1.0:
            _multiply(held, unscale)
            self._group.barrier()
        return self._accept()

    def _accept(self) -> StepDecision:
        # After the last barrier: if a worker is lost before it, the step is done again.
        if self._scale is not None:
            self._scale.grow()
        return HEALTHY

    def _check(self, measured: Sequence[Tensor]) -> tuple[float, float]:
        """Returns whether an element is not finite, as a number, and the squared norm if it is clipped by."""
        if self._clip_norm is None or self._clip_value is not None:
            return float(not all_finite(measured)), 0.0
        squared = squared_norm(measured)
        return float(not math.isfinite(squared) and not all_finite(measured)), squared

    def _counted_once(self, squared: float) -> float:
        """Returns the squared norm of the whole model's gradient from the sum over ranks."""
        if self._times == 1:
            return squared
        # Between two barriers: all of every gradient is there, and none has been multiplied yet.
        repeated = squared_norm(self._repeated())
        if self._stages > 1:
            # As many ranks have each stage.
            repeated = self._group.sum([repeated])[0] * self._stages / self._group.world
        self._group.barrier()
        return max(0.0, squared - (self._times - 1) * repeated)

    def _clamp(self, held: Sequence[Tensor]) -> None:
        if self._clip_value is not None:
            for tensor in held:
                tensor.clamp_(-self._clip_value, self._clip_value)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Tells whether every element is finite."""
    sums = [tensor.sum() for tensor in tensors if tensor.numel()]
    places = {total.device for total in sums}
    if any(place.type != "cpu" for place in places):
        # To wait for each device once.
        sums = [torch.stack([total for total in sums if total.device == place]).sum() for place in places]
    # One pass over memory. The sum of huge numbers may be infinite although each is finite, so then a second look.
    if math.isfinite(sum(abs(total.item()) for total in sums)):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Returns the sum of squares of all elements, in double precision."""
    return sum(
        float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors if tensor.numel()
    )


def clip_coefficient(clip_norm: float, squared: float) -> float:
    """Returns what gradients of a squared norm are multiplied by, as torch's `clip_grad_norm_` does."""
    return min(1.0, clip_norm / (math.sqrt(squared) + 1e-6))


def _multiply(tensors: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0 and tensors:
        foreach_mul_(list(tensors), factor)
