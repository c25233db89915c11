"""Checks and clips gradients on an accelerator: what is decided stays there, and is read later.

record    [ranks whose loss is not finite, whether a gradient is not, squared norm]    summed over the ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.collectives.base import Collective
from headrace.internals import foreach_mul_, foreach_norm
from headrace.training.clipping import LossScale, StepDecision
from headrace.training.on_device.found_inf import FoundInf


class DeviceClipping:
    """The sums that a `GradientClipper` decides by, and its decision, on the device.

    Args:
        rank: among those that decide together; a power of two for each tells whose loss it was.
        clip_norm, clip_value: as of `Options`.
        devices: sums over the ranks what is on the device; None for one rank.
        scale: of the loss.
        found: where it leaves whether the round has an update.
        repeated: as of `GradientClipper`.
        again: which part of their squared norm is too much on each rank, so that the sum over ranks has them once.
    """

    def __init__(
        self,
        rank: int,
        clip: tuple[float | None, float | None],
        devices: Collective | None,
        scale: LossScale | None,
        found: FoundInf | None,
        device: torch.device,
        repeated: Callable[[], Sequence[Tensor]] = tuple,
        again: float = 0.0,
    ) -> None:
        self._own = 2.0 ** min(rank, 50)
        self._clip_norm, self._clip_value = clip
        self._devices = devices
        self._scale = scale
        self._found = found
        self._device = device
        self._repeated = repeated
        self._again = again

    @property
    def masks(self) -> bool:
        """See `DecidesThere`."""
        return self._found is not None and self._found.masks

    def record(self, measured: Sequence[Tensor], finite: bool | Tensor) -> Tensor:
        """See `DecidesThere`."""
        if isinstance(finite, Tensor):
            loss = torch.where(finite, 0.0, self._own).double()
        else:
            loss = self._number(0.0 if finite else self._own)
        present = [tensor for tensor in measured if tensor.numel()]
        squared = again = self._number(0.0)
        if self._clip_norm is not None and self._clip_value is None:
            squared = self._squared(present)
            again = self._again_squared()
            broken = ~squared.isfinite()
            # The square of a huge number is infinite, and the number is not.
            if any(tensor.dtype == torch.float64 for tensor in present):
                broken &= ~self._largest(present).isfinite()
        else:
            broken = ~self._largest(present).isfinite()
        return self._total(torch.stack([loss, broken.double(), squared - again]))

    def decide(self, record: Tensor, measured: Sequence[Tensor], held: Sequence[Tensor]) -> StepDecision:
        """See `DecidesThere`."""
        bad = record[:2].sum() > 0
        factor = None if self._scale is None else torch.as_tensor(self._scale.inverse, device=self._device).double()
        squared = record[2]
        if self._clip_value is not None:
            _multiply(held, factor)
            for tensor in held:
                tensor.clamp_(-self._clip_value, self._clip_value)
            factor = None
            if self._clip_norm is not None:
                own = self._squared([tensor for tensor in measured if tensor.numel()])
                squared = self._total(own - self._again_squared())
        if self._clip_norm is not None:
            squared = squared.clamp(min=0.0)
            norm = squared.sqrt() if factor is None else squared.sqrt() * factor
            coefficient = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            factor = coefficient if factor is None else coefficient * factor
        # As they are after a bad round, where what lies between gradients must not become NaN, too.
        _multiply(held, None if factor is None else torch.where(bad, 1.0, factor))
        if self._found is not None:
            self._found.tensor = bad.float()
        if self._scale is not None:
            scale = self._scale.follow(bad)
            record = torch.cat([record[:2], scale.double().view(1)])
        return StepDecision(record=record)

    def _total(self, tensor: Tensor) -> Tensor:
        if self._devices is not None:
            self._devices.all_reduce(tensor)
        return tensor

    def _again_squared(self) -> Tensor:
        """Returns what this rank's squared norm has too much, because other ranks have it, too."""
        if not self._again:
            return self._number(0.0)
        return self._again * self._squared([tensor for tensor in self._repeated() if tensor.numel()])

    def _squared(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return self._number(0.0)
        return torch.stack(foreach_norm(list(tensors), 2, dtype=torch.float64)).square().sum()

    def _largest(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return self._number(0.0)
        return torch.stack([each.double() for each in foreach_norm(list(tensors), math.inf)]).amax()

    def _number(self, value: float) -> Tensor:
        # Filled there: a copy of a number from the host would be one more thing to wait for.
        return torch.full((), value, dtype=torch.float64, device=self._device)


def _multiply(tensors: Sequence[Tensor], factor: Tensor | None) -> None:
    if factor is None or not tensors:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        if dtype in (torch.float32, torch.float64):
            foreach_mul_(same, factor.to(dtype))
            continue
        # In half precision the factor would be rounded first.
        for tensor in same:
            tensor.copy_(tensor.float() * factor.float() if tensor.is_floating_point() else tensor * factor.float())
