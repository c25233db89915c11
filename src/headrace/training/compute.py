"""The first verb: from a share of the global batch to gradients, and from inputs to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headrace.batches import placed
from headrace.collectives.base import ProcessGroup
from headrace.errors import UsageError
from headrace.metrics import Mean
from headrace.modules import is_dense, parameters_and_buffers
from headrace.spec.job import Share

if TYPE_CHECKING:
    from headrace.spec.events import StagePass


@dataclass(frozen=True)
class Computed:
    """The loss of a step, and its weight in the mean over the global batch.

    The loss is the mean over this worker's share, detached, on its device; None where the share was empty. The weight
    of a `Mean` may be on the device, too, as `()` float64.
    """

    loss: Tensor | None
    weight: float | Tensor


class Compute(ABC):
    """Runs a model, whole, staged or split.

    Attributes:
        module: the model, on `device`; where this rank holds a part of it, the rest is on the meta device.
        counts: whether this rank's outputs, losses and examples count: those of one rank of a replica do.
        divided: whether workers have parts of single parameters.
        mates: the ranks that hold the same part of the model as this one; None for all workers.
        moved_bytes: written for other ranks of its replica and read from them so far.
        notes: lines for the user, about the model.
        in_flight: most micro-batches so far whose activations were kept for their backward at a time.
        passes: of the last step through the stages, on the host's monotonic clock.
    """

    module: nn.Module
    device: torch.device
    counts: bool = True
    divided: bool = False
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

    def explained(self, error: Exception) -> UsageError | None:
        """Returns what an error of torch in the user's code means, where this rank has a part of the model alone."""
        meta = any(parameter.is_meta for parameter in self.module.parameters())
        if not meta or "meta" not in str(error) or not isinstance(error, RuntimeError | NotImplementedError):
            return None
        return UsageError(
            f"this rank holds a part of {type(self.module).__name__}, and the loop uses another "
            f"({type(error).__name__}: {error!s:.200}); of worker.model, this rank's stages have data, and neither it "
            "nor its methods can be called: use worker.step(batch), which computes whole steps, and worker.evaluate()"
        )

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
        """Returns a batch as a step takes it: on the model's device, unless it is padded on the host first."""
        return placed(batch, self.device)
