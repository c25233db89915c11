"""What forward and backward of a whole model take for one batch, what autograd keeps, and how much is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headrace.batches import call
from headrace.modules import set_train_modes
from headrace.pipeline.layer_cost import LayerTiming, between, clock, kept_bytes, place, typical
from headrace.pipeline.profile import limited_threads, loss_of
from headrace.training.user_code.differentiable import has_reentrant_checkpoint
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import unchanged
from headrace.training.user_code.watching import Operations

_LEAST, _MOST = 5, 200
"""Repetitions that count."""
_ADDITIONS = 11


@dataclass(frozen=True)
class BatchPasses:
    """Forward, the loss in it, and backward of one batch.

    Attributes:
        saved_bytes: what autograd keeps from forward to backward, parameters and buffers left out.
        forward_flops: floating-point operations of matrix products, convolutions and attention in forward.
        operations: that torch executes in both, those that only view memory left out.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_flops: int
    operations: int


def measure_passes(
    module: nn.Module,
    objective: Objective,
    batch: Any,
    *,
    seconds: float,
    threads: int | None = None,
    autocast: torch.dtype | None = None,
) -> BatchPasses:
    """Measures a batch on the module's device, at least `seconds` long and 5 times.

    The model and the random numbers are left as they were.
    """
    run = _Run(module, objective, batch)
    context = nullcontext() if autocast is None else torch.autocast(run.device.type, autocast)
    with unchanged(module), limited_threads(threads), context:
        set_train_modes(module)
        saved, flops, operations = run.count()
        times: list[list[LayerTiming]] = []
        until = perf_counter() + seconds
        while len(times) < _LEAST or (perf_counter() < until and len(times) < _MOST):
            times.append(run.timed())
    forward_s, backward_s = typical(times)
    return BatchPasses(forward_s, backward_s, saved, flops, operations)


def accumulation_s(module: nn.Module, threads: int | None = None) -> float:
    """Returns the seconds in which gradients of all parameters are added to those of an earlier micro-batch."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sums, added = ([torch.ones_like(each, requires_grad=False) for each in trained] for _ in range(2))
    device = next((each.device for each in trained), torch.device("cpu"))
    sweeps = []
    with limited_threads(threads):
        for _ in range(_ADDITIONS):
            began = clock(device)
            for one, other in zip(sums, added, strict=True):
                one.add_(other)
            sweeps.append([between(began, clock(device))])
    return typical(sweeps)[0]


class _Run:
    """Runs a batch through the model and back."""

    def __init__(self, module: nn.Module, objective: Objective, batch: Any) -> None:
        self._module = module
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        loss = loss_of(objective, batch)
        self._forward: Callable[[], Tensor] = lambda: loss(call(module, batch, objective.inputs))
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    def timed(self) -> list[LayerTiming]:
        """Returns what forward and backward took."""
        began = clock(self.device)
        loss = self._forward()
        forwarded = clock(self.device)
        self._backward(loss)
        return [between(began, forwarded), between(forwarded, clock(self.device))]

    def count(self) -> tuple[int, int, int]:
        """Returns bytes that autograd keeps, operations of arithmetic in forward, and operations of torch in both."""
        kept, loss = kept_bytes(self._forward, lambda loss: [loss])
        own = {place(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        del loss
        with FlopCounterMode(display=False) as arithmetic:
            self._forward()
        executed: list[bool] = []
        with Operations(lambda operation, *_: executed.append(not operation.is_view)):
            self._backward(self._forward())
        saved = sum(size for where, size in kept.items() if where not in own)
        return saved, arithmetic.get_total_flops(), sum(executed)

    def _backward(self, loss: Tensor) -> Sequence[Tensor | None]:
        if not has_reentrant_checkpoint(loss):
            return torch.autograd.grad(loss, self._trained, allow_unused=True)
        loss.backward()
        gradients = [parameter.grad for parameter in self._trained]
        self._module.zero_grad()
        return gradients
