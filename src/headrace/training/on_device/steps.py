"""Where an optimizer that computes on a device looks for its counts of steps."""

from __future__ import annotations

import torch
from torch import Tensor


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Puts counts of steps where fused and capturable kernels look for them: on the parameter's device."""
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(count := state.get("step"), Tensor):
                    state["step"] = count.to(parameter.device)
