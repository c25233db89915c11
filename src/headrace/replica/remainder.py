"""What is averaged with the parameters and does not lie with them: running statistics, and optimizers' state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.replica.averaging import Average
from headrace.replica.batch_norm import averaged_buffers
from headrace.replica.layout import FlatLayout
from headrace.replica.optimizer import build_over
from headrace.spec.model import ParameterSpec

__all__ = ["Remainder", "remainder"]


@dataclass(frozen=True)
class _Place:
    """Of a tensor in an optimizer's state."""

    parameter: nn.Parameter
    key: str
    like: Tensor


class Remainder:
    """Args:
    buffers: running statistics.
    optimizer: whose state is averaged, too.
    state: where in it, by a probe.
    make: returns what averages tensors of a layout.

    Attributes:
        nbytes: that it adds to the host.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        state: Mapping[nn.Parameter, Mapping[str, Any]],
        make: Callable[[FlatLayout], Average],
    ) -> None:
        self._buffers = list(buffers)
        self._optimizer = optimizer
        self._begins = state
        self._places = [
            _Place(parameter, key, value)
            for parameter, values in state.items()
            for key, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        tensors = [*self._buffers, *(place.like for place in self._places)]
        self._average = make(FlatLayout([_spec(index, tensor) for index, tensor in enumerate(tensors)]))
        self._views = self._average.layout.views(self._average.own)
        self.nbytes = self._average.nbytes

    @property
    def elements(self) -> list[Tensor]:
        """This worker's copy, flat."""
        return self._average.elements

    def gather(self) -> None:
        """Brings this worker's to where it is averaged; what the optimizer has not made yet is 0."""
        for buffer, view in zip(self._buffers, self._views, strict=False):
            view.copy_(buffer)
        for place, view in zip(self._places, self._views[len(self._buffers) :], strict=True):
            value = self._optimizer.state.get(place.parameter, {}).get(place.key)
            view.zero_() if value is None else view.copy_(value)

    def combine(self, weights: Sequence[float]) -> None:
        """Averages; see `Average`."""
        self._average.combine(weights)

    def spread(self) -> None:
        """Brings the means back."""
        for buffer, view in zip(self._buffers, self._views, strict=False):
            buffer.copy_(view)
        for place, view in zip(self._places, self._views[len(self._buffers) :], strict=True):
            state = self._optimizer.state.get(place.parameter)
            if not state:
                # A worker that has had no example yet has made none, and others may have.
                if not view.any():
                    continue
                state = self._optimizer.state[place.parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in self._begins[place.parameter].items()
                }
            state[place.key].copy_(view)


def remainder(
    module: nn.Module, optimizer: torch.optim.Optimizer, average_state: bool, make: Callable[[FlatLayout], Average]
) -> Remainder | None:
    """Returns what is averaged beside the parameters; None where there is nothing.

    Args:
        module: the model.
        optimizer: over its parameters.
        average_state: whether its state is averaged.
        make: see `Remainder`.

    Raises:
        UsageError: the state has no mean.
    """
    buffers = averaged_buffers(module)
    state = _probe(module, optimizer) if average_state else {}
    return Remainder(buffers, optimizer, state, make) if buffers or state else None


def _probe(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """Returns what state the optimizer makes in its first step, if no parameter has a gradient but 0."""
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    likes = {name: nn.Parameter(torch.zeros_like(parameter)) for name, parameter in named.items()}
    for like in likes.values():
        like.grad = torch.zeros_like(like)
    probe = build_over(optimizer, {name: [like] for name, like in likes.items()})
    probe.step()
    for name, like in likes.items():
        for key, value in probe.state.get(like, {}).items():
            _require_mean(probe, name, key, value)
    return {named[name]: dict(probe.state[like]) for name, like in likes.items() if probe.state.get(like)}


def _require_mean(optimizer: torch.optim.Optimizer, name: str, key: str, value: Any) -> None:
    if value is None or isinstance(value, int | float):
        return
    if isinstance(value, Tensor) and (value.is_floating_point() or value.numel() == 1):
        return
    form = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UsageError(
        f"average_optimizer_state: {type(optimizer).__name__} keeps {form} as {key!r} of {name!r}, which has no mean; "
        "use average_optimizer_state=False, and each worker keeps its own state"
    )


def _spec(index: int, tensor: Tensor) -> ParameterSpec:
    return ParameterSpec(str(index), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
