"""From a model to its specification."""

from __future__ import annotations

from torch import Tensor, nn

from headrace.spec.model import ModelSpec, ParameterSpec

__all__ = ["describe"]


def describe(module: nn.Module, sliceable: bool = True) -> ModelSpec:
    """Returns names, shapes and types of a model's parameters (tied ones once) and buffers."""
    return ModelSpec(
        parameters=tuple(_spec(name, tensor) for name, tensor in module.named_parameters()),
        buffers=tuple(_spec(name, tensor) for name, tensor in module.named_buffers()),
        sliceable=sliceable,
    )


def _spec(name: str, tensor: Tensor) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        trainable=tensor.requires_grad,
    )
