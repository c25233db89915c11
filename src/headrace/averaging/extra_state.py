"""What is averaged with the parameters and does not lie with them: running statistics, and optimizers' state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.averaging.worker_average import WorkerAverage
from headrace.errors import UsageError
from headrace.spec.model import ParameterSpec
from headrace.training.batch_norm import averaged_buffers
from headrace.training.flat_layout import FlatLayout
from headrace.training.optimizer import build_over


@dataclass(frozen=True)
class _Like:
    """Of a tensor in an optimizer's state that has a mean.

    Attributes:
        name: of the parameter that it belongs to.
        key: the optimizer's own, "momentum_buffer".
        value: of the same shape and type.
    """

    name: str
    key: str
    value: Tensor


class MeanState:
    """An optimizer's state, as far as it has a mean, and its way to other places and back.

    Args:
        optimizer: whose.
        named: its parameters.
        begins: what state it makes in its first step, by parameter.

    Attributes:
        likes: of all that has a mean.
        specs: the same, as if it were parameters called "weight/momentum_buffer".
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], begins: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._optimizer = optimizer
        self._named = named
        self._begins = begins
        self.likes = [
            _Like(name, key, value)
            for name, values in begins.items()
            for key, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        self.specs = [_spec(f"{like.name}/{like.key}", like.value) for like in self.likes]

    def gather(self, views: Sequence[Tensor]) -> None:
        """Brings it into tensors like `likes`; what the optimizer has not made yet is 0."""
        for like, view in zip(self.likes, views, strict=True):
            value = self._optimizer.state.get(self._named[like.name], {}).get(like.key)
            view.zero_() if value is None else view.copy_(value)

    def spread(self, views: Sequence[Tensor]) -> None:
        """Brings it back."""
        for like, view in zip(self.likes, views, strict=True):
            parameter = self._named[like.name]
            state = self._optimizer.state.get(parameter)
            if not state:
                # A worker that has had no example yet has made none, and others may have.
                if not view.any():
                    continue
                state = self._optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in self._begins[like.name].items()
                }
            state[like.key].copy_(view)


class ExtraState:
    """Args:
    buffers: running statistics.
    state: of the optimizer.
    make: returns what averages tensors of a layout.

    Attributes:
        nbytes: that it adds to the host.
    """

    def __init__(
        self, buffers: Sequence[Tensor], state: MeanState, make: Callable[[FlatLayout], WorkerAverage]
    ) -> None:
        self._buffers = list(buffers)
        self._state = state
        tensors = [*self._buffers, *(like.value for like in state.likes)]
        self._average = make(FlatLayout([_spec(str(index), tensor) for index, tensor in enumerate(tensors)]))
        views = self._average.layout.views(self._average.own)
        self._statistics, self._kept = views[: len(self._buffers)], views[len(self._buffers) :]
        self.nbytes = self._average.nbytes

    @property
    def elements(self) -> list[Tensor]:
        """This worker's copy, flat."""
        return self._average.elements

    def gather(self) -> None:
        """Brings this worker's to where it is averaged."""
        for buffer, view in zip(self._buffers, self._statistics, strict=True):
            view.copy_(buffer)
        self._state.gather(self._kept)

    def combine(self, weights: Sequence[float]) -> None:
        """Averages; see `WorkerAverage`."""
        self._average.combine(weights)

    def spread(self) -> None:
        """Brings the means back."""
        for buffer, view in zip(self._buffers, self._statistics, strict=True):
            buffer.copy_(view)
        self._state.spread(self._kept)


def remainder(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    average_state: bool,
    make: Callable[[FlatLayout], WorkerAverage],
) -> ExtraState | None:
    """Returns what is averaged beside the parameters; None where there is nothing.

    Args:
        module: the model.
        optimizer: over its parameters.
        average_state: whether its state is averaged.
        make: see `ExtraState`.

    Raises:
        UsageError: the state has no mean.
    """
    buffers = averaged_buffers(module)
    state = mean_state(dict(module.named_parameters()), optimizer) if average_state else MeanState(optimizer, {}, {})
    return ExtraState(buffers, state, make) if buffers or state.likes else None


def mean_state(named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> MeanState:
    """Returns the state of an optimizer over parameters: that which it makes in its first step, of gradients of 0.

    Raises:
        UsageError: it has no mean.
    """
    likes = {name: nn.Parameter(torch.zeros_like(each)) for name, each in named.items() if each.requires_grad}
    for like in likes.values():
        like.grad = torch.zeros_like(like)
    probe = build_over(optimizer, {name: [like] for name, like in likes.items()})
    probe.step()
    begins = {name: dict(probe.state[like]) for name, like in likes.items() if probe.state.get(like)}
    for name, values in begins.items():
        for key, value in values.items():
            _require_mean(probe, name, key, value)
    return MeanState(optimizer, named, begins)


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


def _spec(name: str, tensor: Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
