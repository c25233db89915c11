"""From a model to its specification, and to the tensors that are saved of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from headrace.spec.model import ModelSpec, ParameterSpec


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
