"""The first verb: from a share of the global batch to gradients, and from inputs to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from headrace.batches import call, select_target
from headrace.collectives.base import ProcessGroup
from headrace.errors import UsageError
from headrace.metrics import Mean
from headrace.modules import frozen_until, held_part, is_dense, parameters_and_buffers
from headrace.spec.events import StagePass
from headrace.spec.job import Share
from headrace.trees import map_tensors


@dataclass(frozen=True)
class Computed:
    """The loss of a step, and its weight in the mean over the global batch.

    The loss is the mean over this worker's share, detached, on its device; None where the share was empty.
    """

    loss: Tensor | None
    weight: float


@dataclass(frozen=True)
class Objective:
    """The loss, `loss(output, target)`, and how `inputs` and `target` are selected from a batch, as in `Job`.

    `weighed` tells whether the loss is a `Mean`, whose total weight is a sum over workers. Where a part of a model is
    trained, `model` is the whole one, and the loss is `loss(model, batch)`.
    """

    loss: Callable[..., Any]
    inputs: Any = None
    target: Any = None
    weighed: bool = False
    model: nn.Module | None = None

    def of(self, forward: Callable[..., Any], batch: Any) -> Tensor | Mean:
        """Returns the loss of a batch, whose output `forward` makes."""
        if self.model is not None:
            taken = self.model, batch
        else:
            taken = call(forward, batch, self.inputs), select_target(batch, self.target)
        loss: Tensor | Mean = self.loss(*taken)
        return loss


class Compute(ABC):
    """Runs a model, whole, staged or split.

    Attributes:
        module: the model, on `device`; where this rank holds a part of it, the rest is on the meta device.
        counts: whether this rank's outputs, losses and examples count: those of one rank of a replica do.
        mates: the ranks that hold the same part of the model as this one; None for all workers.
        moved_bytes: written for other ranks of its replica and read from them so far.
        notes: lines for the user, about the model.
        in_flight: most micro-batches so far whose activations were kept for their backward at a time.
        passes: of the last step through the stages, on the host's monotonic clock.
    """

    module: nn.Module
    device: torch.device
    counts: bool = True
    mates: ProcessGroup | None = None
    moved_bytes: int = 0
    notes: tuple[str, ...] = ()
    in_flight: int = 1
    passes: Sequence[StagePass] = ()

    @abstractmethod
    def run(self, share: Share) -> Computed:
        """Computes this share's contribution to the gradient of the global batch's mean loss, for the exchange."""

    def backward(self, loss: Tensor | Mean, share: Share, adds: bool = False) -> Computed:
        """Leaves the gradient of the caller's own loss, the mean over the share, in `.grad`, until `send`.

        It is the one of this loss; `adds` adds it to those of other losses of the round. Where a loss is a `Mean`, it
        is scaled so that the mean over workers, weighted by their examples, is the gradient of the global mean.

        Raises:
            UsageError: the strategy computes forward and backward together.
        """
        raise UsageError("the strategy computes whole steps; use worker.step(batch)")

    def send(self, share: Share) -> None:  # noqa: B027  (where there is no `backward`, there is nothing to send)
        """Contributes what is in `.grad`, for the exchange: the gradients of `backward`, as the caller has left them.

        Raises:
            UsageError: the caller has changed them, and the strategy cannot follow.
        """

    @abstractmethod
    def predict(self, batch: Any) -> Any:
        """Returns the model's output for a batch, without gradients."""

    def attend(self) -> None:  # noqa: B027  (most workers predict by themselves)
        """Takes part in what others predict, where this worker has no examples and they need its parameters."""

    def equal_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields by name the parameters that are the same on this rank's `mates` whenever these have synchronized."""
        for name, parameter in self.module.named_parameters():
            if not parameter.is_meta and is_dense(parameter):
                yield name, parameter

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters and buffers that this rank saves, whole, one at a time, by checkpoint name.

        All ranks of a replica call it together, and together save each tensor once; the first of those that hold the
        same part `leads`.
        """
        if leads:
            yield from ((name, tensor) for name, tensor in parameters_and_buffers(self.module) if not tensor.is_meta)

    def has_state_of(self, module: str) -> bool:
        """Tells whether this rank calls a module, given by name, that has extra state (`get_extra_state`)."""
        return True

    def place(self, batch: Any) -> Any:
        """Returns a batch on the model's device."""
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)


class ReadGradients:
    """Gradients that user code may read between backward and update, and not change; `why` says why not."""

    def __init__(self, named: Mapping[str, Tensor], why: str) -> None:
        self._named, self._why = named, why
        self._seen: dict[str, tuple[Tensor, Tensor] | None] = {}

    def look(self) -> None:
        """Keeps copies of them."""
        for name, parameter in self._named.items():
            gradient = parameter.grad
            self._seen[name] = None if gradient is None else (gradient, _bytes(gradient).clone())

    def forget(self) -> None:
        """Drops the copies."""
        self._seen.clear()

    def require_unchanged(self) -> None:
        """Raises UsageError if one is not as it was."""
        for name, seen in self._seen.items():
            gradient = self._named[name].grad
            if seen is None if gradient is None else seen and gradient is seen[0] and _same(gradient, seen[1]):
                continue
            raise UsageError(
                f".grad of {name!r} was changed between worker.backward(loss) and worker.update(), where {self._why}, "
                "so that what is changed there is not sent; use Options(clip_norm=...) or clip_value, change the loss, "
                "or use mirrored, whose workers have whole gradients"
            )
        self._seen.clear()


def _bytes(gradient: Tensor) -> Tensor:
    """Returns the elements that this process has of a gradient."""
    return held_part(gradient).detach().contiguous().view(-1).view(torch.uint8)


def _same(gradient: Tensor, copy: Tensor) -> bool:
    return torch.equal(_bytes(gradient), copy)


class TrainedParameters:
    """The parameters of a module that are trained, of which some are frozen in the first epochs (`hr.frozen`).

    Attributes:
        every: all of them, in the module's order.
        last_begin: the epoch from which on all are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        until = frozen_until(module)
        self.every = list(named.values())
        self._begins = [until.get(name, 0) for name in named]
        self._frozen = {name: each for name, each in module.named_parameters() if name not in named}
        self.last_begin = max(self._begins, default=0)

    def in_epoch(self, epoch: int) -> list[nn.Parameter]:
        """Returns those that are trained in an epoch, without those that user code has frozen since.

        Raises:
            UsageError: user code trains one that was frozen when the run began.
        """
        self.require_frozen()
        if epoch >= self.last_begin and all(map(_REQUIRES_GRAD, self.every)):
            return self.every
        pairs = zip(self.every, self._begins, strict=True)
        return [parameter for parameter, begin in pairs if begin <= epoch and parameter.requires_grad]

    def require_frozen(self) -> None:
        """Raises UsageError if user code trains one that was frozen when the run began."""
        if any(map(_REQUIRES_GRAD, self._frozen.values())):
            names = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
            raise UsageError(
                f"{', '.join(map(repr, names)):.200}: requires_grad was False when the run began and is True now; "
                "neither the exchange nor checkpoints know of it; use hr.frozen(model, pattern, until_epoch=...), or "
                "build the model with all trained that ever is, and freeze it in the loop before the first step"
            )

    def all_of(self, live: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Returns one gradient for each, from those of `live`; None for those that are frozen."""
        if live is self.every:
            return gradients
        known = dict(zip(map(id, live), gradients, strict=True))
        return [known.get(id(parameter)) for parameter in self.every]


_REQUIRES_GRAD = attrgetter("requires_grad")


class FixedParameters:
    """Refuses a change of `requires_grad` where it cannot be followed; `why` says why not."""

    def __init__(self, named: Mapping[str, Tensor], why: str) -> None:
        self._named, self._why = dict(named), why
        self._flags = [parameter.requires_grad for parameter in self._named.values()]

    def require(self) -> None:
        """Raises UsageError if one is not as it was."""
        if [*map(_REQUIRES_GRAD, self._named.values())] == self._flags:
            return
        pairs = zip(self._named.items(), self._flags, strict=True)
        changed = [name for (name, parameter), flag in pairs if parameter.requires_grad != flag]
        raise UsageError(
            f"requires_grad of {', '.join(map(repr, changed)):.200} has changed since the run began, and {self._why}; "
            "use hr.frozen(model, pattern, until_epoch=...)"
        )
