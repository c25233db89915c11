"""The first verb: from a share of the global batch to gradients, and from inputs to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.errors import UsageError
from headrace.metrics import Mean
from headrace.spec.events import StagePass
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec, ParameterSpec


@dataclass(frozen=True)
class Computed:
    """What came out of a step's compute.

    Attributes:
        loss: the mean over this worker's share, detached, on its device; None where the share was empty.
        weight: what that loss weighs in the mean over the global batch.
    """

    loss: Tensor | None
    weight: float


class Compute(ABC):
    """Runs a model, whole, staged or split.

    Attributes:
        module: the model; where this rank holds a part of it, the rest is on the meta device.
        counts: whether outputs, losses and examples of this rank are those that count. The ranks of one replica have
            the same share, and one of them speaks for all.
        mates: the ranks that hold the same part of the model as this one; None for all workers.
        moved_bytes: that it has written for other ranks of its replica and read from them so far.
        notes: lines for the user: what was found out about the model only here.
        in_flight: most micro-batches so far whose activations waited for their backward at a time.
        passes: of the last step, on the host's monotonic clock, where a batch goes through in pieces.
    """

    module: nn.Module
    counts: bool = True
    mates: ProcessGroup | None = None
    moved_bytes: int = 0
    notes: tuple[str, ...] = ()
    in_flight: int = 1
    passes: Sequence[StagePass] = ()

    @abstractmethod
    def run(self, share: Share) -> Computed:
        """Leaves this share's contribution to the gradient of the global batch's mean loss with the exchange."""

    def backward(self, loss: Tensor | Mean, share: Share) -> Computed:
        """Does so with a loss of the caller's own, the mean over the share.

        Raises:
            UsageError: there is no such loss, because forward and backward are one.
        """
        raise UsageError("the strategy computes whole steps; use worker.step(batch)")

    @abstractmethod
    def predict(self, batch: Any) -> Any:
        """Returns the model's output for a batch, without gradients."""

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters and buffers that this rank saves, whole, one at a time, by checkpoint name.

        All ranks of a replica call it together, and together save each tensor once.

        Args:
            leads: whether it is the first of those that hold the same part.
        """
        if leads:
            yield from ((name, tensor) for name, tensor in parameters_and_buffers(self.module) if not tensor.is_meta)

    @abstractmethod
    def place(self, batch: Any) -> Any:
        """Returns a batch on the model's device."""


def describe(module: nn.Module, sliceable: bool = True) -> ModelSpec:
    """Returns names, shapes and types of a model's parameters (tied ones once) and buffers."""
    return ModelSpec(
        parameters=tuple(_spec(name, tensor) for name, tensor in module.named_parameters()),
        buffers=tuple(_spec(name, tensor) for name, tensor in module.named_buffers()),
        sliceable=sliceable,
    )


def parameters_and_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter once and every buffer that belongs to the model's state, by checkpoint name."""
    for name, parameter in module.named_parameters():
        yield f"parameter/{name}", parameter.detach()
    kept = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in kept:
            yield f"buffer/{name}", buffer


def _spec(name: str, tensor: Tensor) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        trainable=tensor.requires_grad,
    )
