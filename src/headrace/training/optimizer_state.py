"""The state of an optimizer: cut into named pieces for checkpoints and messages, or averaged over workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.spec.model import ParameterSpec
from headrace.spec.plan import Segment
from headrace.training.optimizer import build_over

_NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


@dataclass(frozen=True)
class StatePiece:
    """A piece of optimizer state, in a form that any other split of the parameters can load.

    Attributes:
        start: first element of the flattened parameter that `value` covers; -1 if `value` belongs to the whole
            parameter (a step count, the statistics of its rows).
        value: flat; in its own shape where it belongs to the whole parameter.
    """

    parameter: str
    key: str
    start: int
    value: Tensor
    kind: str = "tensor"

    @property
    def name(self) -> str:
        """Its name in files and messages; `parse` reads it."""
        return f"{self.parameter}/{self.key}@{self.start}" + f"#{self.kind}" * (self.kind != "tensor")

    @classmethod
    def parse(cls, name: str, value: Tensor) -> StatePiece:
        """Returns the piece of that name.

        Raises:
            ValueError: no piece has such a name.
        """
        head, _, tail = name.rpartition("@")
        start, _, kind = tail.partition("#")
        parameter, _, key = head.rpartition("/")
        if int(start) < -1:
            raise ValueError(f"{name} begins before its parameter")
        return cls(parameter, key, int(start), value, kind or "tensor")

    def copy_to(self, target: Tensor, start: int) -> None:
        """Copies what this piece covers into a contiguous tensor that begins with the parameter's element `start`."""
        low, high = max(start, self.start), min(start + target.numel(), self.start + self.value.numel())
        if low < high:
            target.view(-1)[low - start : high - start].copy_(self.value[low - self.start : high - self.start])


def state_pieces(optimizer: torch.optim.Optimizer, owned: Sequence[tuple[Segment, Tensor]]) -> tuple[StatePiece, ...]:
    """Returns the state of the pieces that this process updates.

    Raises:
        UsageError: the optimizer keeps something that is no tensor and no number.
    """
    pieces = []
    for segment, tensor in owned:
        for key, value in optimizer.state.get(tensor, {}).items():
            if not isinstance(value, Tensor):
                pieces.append(_number(segment, key, value, optimizer))
                continue
            kept = value.detach().clone()
            whole = kept.numel() != tensor.numel() or kept.dim() == 0
            start, kept = (-1, kept) if whole else (segment.start, kept.flatten())
            pieces.append(StatePiece(segment.parameter, key, start, kept))
    return tuple(pieces)


def _number(segment: Segment, key: str, value: Any, optimizer: torch.optim.Optimizer) -> StatePiece:
    kind = type(value).__name__
    if kind not in _NUMBERS:
        raise UsageError(
            f"{type(optimizer).__name__} keeps a {kind} as {key!r} of {segment.parameter!r}, which no checkpoint can "
            "hold; keep tensors and numbers, or run with checkpoints=False"
        )
    return StatePiece(segment.parameter, key, -1, torch.tensor(value, dtype=_NUMBERS[kind]), kind)


def load_state(
    optimizer: torch.optim.Optimizer, owned: Sequence[tuple[Segment, Tensor]], pieces: Iterable[StatePiece]
) -> None:
    """Replaces the state of the pieces that this process updates by `pieces`, however these are cut."""
    by_parameter: dict[str, list[StatePiece]] = {}
    for piece in pieces:
        by_parameter.setdefault(piece.parameter, []).append(piece)
    for segment, tensor in owned:
        state: dict[str, Any] = {}
        for piece in by_parameter.get(segment.parameter, ()):
            if piece.start < 0:
                state[piece.key] = piece.value.clone() if piece.kind == "tensor" else piece.value.item()
                continue
            target = state.setdefault(
                piece.key, torch.zeros(tensor.shape, dtype=piece.value.dtype, device=tensor.device)
            )
            piece.copy_to(target, segment.start)
        if state:
            optimizer.state[tensor] = state
        else:
            optimizer.state.pop(tensor, None)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes that the optimizer's state takes."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class _Like:
    """A tensor in an optimizer's state that has a mean: its parameter, its key, and a value of its shape and type."""

    name: str
    key: str
    value: Tensor


class MeanState:
    """The part of an optimizer's state that has a mean, copied to other places and back."""

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
        self.specs = [describe_tensor(f"{like.name}/{like.key}", like.value) for like in self.likes]

    def gather(self, views: Sequence[Tensor]) -> None:
        """Copies it into tensors like `likes`; state that the optimizer has not made yet is 0."""
        for like, view in zip(self.likes, views, strict=True):
            value = self._optimizer.state.get(self._named[like.name], {}).get(like.key)
            view.zero_() if value is None else view.copy_(value)

    def spread(self, views: Sequence[Tensor]) -> None:
        """Copies it back."""
        for like, view in zip(self.likes, views, strict=True):
            parameter = self._named[like.name]
            state = self._optimizer.state.get(parameter)
            if not state:
                # This worker has had no example yet, and others may have.
                if not view.any():
                    continue
                state = self._optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in self._begins[like.name].items()
                }
            state[like.key].copy_(view)


def mean_state(named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> MeanState:
    """Returns the part of an optimizer's state that has a mean, found by a first step with gradients of 0.

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


def describe_tensor(name: str, tensor: Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
