"""Weights of losses that are `Mean`s, on the device: a step needs their sum before backward, and the host does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.collectives.base import Collective


class DeviceTotal:
    """Sums numbers over workers on their device, where these number more than one: `devices` does.

    It is called as `Collective.sum` is.
    """

    def __init__(self, devices: Collective | None, device: torch.device) -> None:
        self._devices, self._device = devices, device

    def number(self, value: float | Tensor) -> Tensor:
        """Returns a number as `()` float64 on the device."""
        if isinstance(value, Tensor):
            return value.detach().to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def __call__(self, values: Sequence[float | Tensor]) -> list[Tensor]:
        total = torch.stack([self.number(value) for value in values])
        if self._devices is not None:
            self._devices.all_reduce(total)
        return list(total.unbind())


Total = Callable[[Sequence[float]], list[float]] | DeviceTotal
"""Sums numbers over workers, on the host or where they lie."""


def own_weight(total: Total, weights: Sequence[float | Tensor]) -> float | Tensor:
    """Returns the sum of this worker's weights, where `total` sums those of all."""
    return total.number(sum(weights)) if isinstance(total, DeviceTotal) else float(sum(weights))


def all_weight(total: Total, own: float | Tensor) -> float | Tensor:
    """Returns the sum of all workers' weights, which all call for."""
    (every,) = total([own]) if isinstance(total, DeviceTotal) else total([float(own)])
    return every


def mean_of(totals: Sequence[Tensor], weight: float | Tensor) -> Tensor | None:
    """Returns the sum of totals by their weight; None where there are none, or the host knows that nothing weighs."""
    if not totals or (not isinstance(weight, Tensor) and not weight):
        return None
    return over(totals[0] if len(totals) == 1 else torch.stack([*totals]).sum(), weight)


def over(total: Tensor, weight: float | Tensor) -> Tensor:
    """Returns a total by its weight, in the total's type; 0 where nothing weighs."""
    if not isinstance(weight, Tensor):
        return total / weight if weight else total * 0
    nothing = weight == 0
    # In half precision the weight might be infinite.
    wide = torch.promote_types(total.dtype, torch.float32)
    return (total.to(wide) / torch.where(nothing, 1.0, weight).to(wide) * ~nothing).to(total.dtype)
