"""A part of the batch on every device: for layers that compute much and hold little."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd

from headrace.collectives.base import Collective
from headrace.errors import UsageError
from headrace.tensor_parallel.collectives import copy_all_to, gather_from, rows, scatter_to
from headrace.tensor_parallel.layers import ParallelDropout
from headrace.training.batch_norm import synchronise_batch_norm
from headrace.trees import map_tensors


class BatchParallel:
    """A module that is whole on every rank, where each computes some of the examples: data parallelism inside a model.

    Gradients of its parameters are summed over ranks in one piece (Krizhevsky, "One weird trick for parallelizing
    convolutional neural networks", 2014, section 4: so are convolutions parallel, and dense layers by their features).

    Args:
        module: whose place it takes.
        group: the ranks.
        gathers: whether its outputs go on whole.
        name: of the module, for errors.

    Raises:
        UsageError: a layer of it draws random numbers in a way of its own.
    """

    def __init__(self, module: nn.Module, group: Collective, gathers: bool, name: str) -> None:
        synchronise_batch_norm(module, group)
        for path, child in module.named_modules():
            if isinstance(child, _DropoutNd | nn.RReLU) and type(child) is not nn.Dropout:
                raise UsageError(
                    f"'{name}.{path}' is a {type(child).__name__}, and of what it draws each device would draw "
                    "a part of its own, so that they no longer draw alike; use nn.Dropout, or leave it without 'batch'"
                )
            if type(child) is nn.Dropout:
                child.forward = ParallelDropout(child, 0, group, self.length)  # type: ignore[method-assign]
        self._body = _Body(module)
        self._group = group
        self._gathers = gathers
        self._name = name
        self._length = 0

    def length(self) -> int:
        """Returns how many examples the last batch had."""
        return self._length

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._length = len(next(each for each in (*arguments, *named.values()) if isinstance(each, Tensor)))
        arguments, named = map_tensors(self._some, (arguments, named))
        learned = {name: each for name, each in self._body.named_parameters() if each.requires_grad}
        entered = copy_all_to(tuple(learned.values()), self._group) if learned else ()
        outputs = functional_call(self._body, dict(zip(learned, entered, strict=True)), arguments, named)
        return map_tensors(self._made, outputs)

    def _some(self, x: Tensor) -> Tensor:
        self._require(x, self._length, "is given")
        return scatter_to(x, 0, self._group)

    def _made(self, x: Tensor) -> Tensor:
        start, stop = rows(self._length, self._group.rank, self._group.world)
        self._require(x, stop - start, "returns")
        return gather_from(x, 0, self._group, self._length) if self._gathers else x

    def _require(self, x: Tensor, examples: int, does: str) -> None:
        if not x.dim() or len(x) != examples:
            raise UsageError(
                f"{self._name!r} computes some of the examples on every device (rule 'batch'), and {does} a tensor of "
                f"shape {tuple(x.shape)}, which has not one entry for each of {examples} examples along its first dim; "
                "leave it without 'batch'"
            )


class _Body(nn.Module):
    """A module as it was, with the same parameters in the same places.

    Args:
        module: which.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self.forward = module.forward
