"""The first verb: from a share of the global batch to gradients, and from inputs to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.errors import UsageError
from headrace.metrics import Mean
from headrace.spec.events import StagePass
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.trees import map_tensors


@dataclass(frozen=True)
class Computed:
    """The loss of a step, and its weight in the mean over the global batch.

    The loss is the mean over this worker's share, detached, on its device; None where the share was empty.
    """

    loss: Tensor | None
    weight: float


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

    def backward(self, loss: Tensor | Mean, share: Share) -> Computed:
        """Does so from the caller's own loss, the mean over the share.

        Raises:
            UsageError: the strategy computes forward and backward together.
        """
        raise UsageError("the strategy computes whole steps; use worker.step(batch)")

    @abstractmethod
    def predict(self, batch: Any) -> Any:
        """Returns the model's output for a batch, without gradients."""

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters and buffers that this rank saves, whole, one at a time, by checkpoint name.

        All ranks of a replica call it together, and together save each tensor once; the first of those that hold the
        same part `leads`.
        """
        if leads:
            yield from ((name, tensor) for name, tensor in parameters_and_buffers(self.module) if not tensor.is_meta)

    def place(self, batch: Any) -> Any:
        """Returns a batch on the model's device."""
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module into eval mode; afterwards each part is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        # Not train(), which would put parts into train mode that their owner keeps in eval mode.
        for part, mode in modes:
            part.training = mode


def set_train_modes(module: nn.Module) -> None:
    """Puts a module that is in eval mode as a whole into train mode; in one that is not, parts in eval mode stay so.

    A part whose `train` is its own decides what it keeps in eval mode.
    """
    if not module.training:
        module.train()
        return
    kept = [part for part in module.modules() if not part.training]
    for part in list(module.modules()):
        if part.training and type(part).train is not nn.Module.train:
            part.train()
    for part in kept:
        part.training = False


def describe(module: nn.Module, sliceable: bool = True) -> ModelSpec:
    """Returns names, shapes and types of a model's parameters (tied ones once) and buffers."""
    return ModelSpec(
        parameters=tuple(_spec(name, tensor) for name, tensor in module.named_parameters()),
        buffers=tuple(_spec(name, tensor) for name, tensor in module.named_buffers()),
        sliceable=sliceable,
    )


def is_dense(tensor: Tensor) -> bool:
    """Tells whether a tensor is stored element by element; sparse ones (COO, CSR) are not."""
    return tensor.layout is torch.strided


def restore(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor a value of the same form; a sparse one may have other elements than before."""
    if is_dense(tensor):
        tensor.copy_(value)
    else:
        tensor.data = value.to(tensor.device).clone()


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
