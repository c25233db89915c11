"""The update of a round of which the device alone knows whether its gradients are finite: masked there.

    device   gradients ─► found_inf ─► fused step, which does nothing where it is 1
    host     ───────────────────────► the next round; reads many rounds' found_inf later, in one copy

"found_inf" is the name that PyTorch's `GradScaler` and fused optimizers have for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from headrace.internals import foreach_lerp_
from headrace.training.on_device.steps import place_steps
from headrace.training.optimizer import has_step_hooks

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class FoundInf:
    """Whether the gradients of the current round are not finite, on the device.

    Attributes:
        tensor: `()` float32, 1 for a round without an update; None where the host has decided.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: Sequence[Tensor] = ()
        self._ours: list[dict[str, object]] = []

    def of(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        """Takes the optimizer of the parameters, whose steps are PyTorch's alone."""
        self._optimizer, self._parameters = optimizer, parameters

    @cached_property
    def masks(self) -> bool:
        """Whether the optimizer looks at it; then it computes by fused kernels, if the job has not said how."""
        optimizer = self._optimizer
        kind: Any = type(optimizer)
        if optimizer is None or kind not in _FUSED or has_step_hooks(optimizer):
            return False
        for group in optimizer.param_groups:
            said = group["foreach"] is not None or group["fused"] is False or group.get("capturable")
            if said or group["differentiable"]:
                return False
        places = {tensor.device for tensor in self._parameters}
        real = all(tensor.is_floating_point() for tensor in self._parameters)
        if not real or not all(_is_masked(kind, place) for place in places):
            return False
        self._ours = [group for group in optimizer.param_groups if group["fused"] is None]
        self._fuse(True)
        # Of a run that goes on, they have been loaded before.
        place_steps(optimizer)
        return True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the step of a round, unless its gradients are not finite."""
        if not _lacks_state(optimizer, len(self._parameters)):
            vars(optimizer)["found_inf"] = self.tensor
            try:
                optimizer.step()
            finally:
                del vars(optimizer)["found_inf"]
            return
        # A step that makes state cannot be undone by a mask: the host waits, in the first rounds of a run.
        if self.is_bad():
            return
        # The fused SGD needs all momentum buffers or none, and no gradient that is sparse.
        alone = isinstance(optimizer, torch.optim.SGD)
        if alone:
            self._fuse(None)
        optimizer.step()
        if alone:
            self._fuse(True)

    def is_bad(self) -> bool:
        """Waits for the device, and tells whether the round has no update."""
        assert self.tensor is not None
        return bool(self.tensor)

    def average(self, averages: list[Tensor], values: list[Tensor], weight: float) -> None:
        """Moves averages towards values by a weight, in a round with an update."""
        assert self.tensor is not None
        masked = (1 - self.tensor.double()) * weight
        weights = {dtype: masked.to(dtype) for dtype in {average.dtype for average in averages}}
        foreach_lerp_(averages, values, [weights[average.dtype] for average in averages])

    def _fuse(self, fused: bool | None) -> None:
        for group in self._ours:
            group["fused"] = fused


def _lacks_state(optimizer: torch.optim.Optimizer, count: int) -> bool:
    """Tells whether a step would make state, or has gradients that fused kernels do not take."""
    if isinstance(optimizer, torch.optim.SGD):
        groups = [group for group in optimizer.param_groups if group["momentum"]]
        gradients = (each.grad for group in optimizer.param_groups for each in group["params"])
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            return True
    else:
        groups = optimizer.param_groups
    state = optimizer.state
    if len(state) >= count:
        return False
    return any(each.grad is not None and each not in state for group in groups for each in group["params"])


@cache
def _is_masked(kind: Any, device: torch.device) -> bool:
    """Tells, by one step, whether a fused optimizer does nothing on a device where `found_inf` is 1."""
    parameter = nn.Parameter(torch.ones(1, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = kind([parameter], lr=0.5, fused=True)
        vars(optimizer)["found_inf"] = torch.ones((), device=device)
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        return False
    return parameter.item() == 1
