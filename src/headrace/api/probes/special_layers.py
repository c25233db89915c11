"""Layers that need something before the start: sparse gradients are refused, lazy layers get their shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headrace.errors import JobError
from headrace.internals import SPARSE_ARGUMENTS, TorchDispatchMode


def refuse_sparse_layers(module: nn.Module) -> None:
    """Raises JobError for classes of one's own, derived from embeddings, whose gradients are sparse."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise JobError(
                f"the layer {name!r} is a {type(layer).__name__} with sparse gradients, and only those of nn.Embedding "
                "and nn.EmbeddingBag themselves travel as rows; use one of these, or sparse=False"
            )
    for name, parameter in module.named_parameters():
        if parameter.layout is not torch.strided and parameter.requires_grad:
            raise JobError(
                f"the parameter {name!r} is sparse ({parameter.layout}), and its gradients are not exchanged; make it "
                "dense, or a buffer, which is not trained"
            )


class NoSparseGradients(TorchDispatchMode):
    """Refuses, while a model runs, the functions that make sparse gradients of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(each): name for name, each in module.named_parameters() if each.requires_grad}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = SPARSE_ARGUMENTS.get(func.name())
        sparse = place is not None and (args[place] if len(args) > place else (kwargs or {}).get("sparse", False))
        if sparse:
            weight: Tensor = args[0]
            name = self._names.get(id(weight))
            if name is not None:
                raise JobError(
                    f"forward makes sparse gradients of the parameter {name!r} ({func.overloadpacket.__name__} with "
                    "sparse=True), which are not exchanged; use sparse=False"
                )
        return func(*args, **(kwargs or {}))


def lazy_tensors(module: nn.Module) -> list[str]:
    """Returns the names of the parameters and buffers that get their shapes from the first batch."""
    return [name for name, each in (*module.named_parameters(), *module.named_buffers()) if is_lazy(each)]
