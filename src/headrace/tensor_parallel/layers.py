"""What layers do of which each device has a part: each takes the place of a layer's `forward`, and uses its parameters.

The layers themselves stay where they are, with their names, hooks and modes; only their parameters are parts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from headrace import internals
from headrace.collectives.base import Collective
from headrace.errors import UsageError
from headrace.internals import ConvNd, DropoutNd
from headrace.tensor_parallel.collectives import (
    all_gather_to,
    copy_all_to,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_from,
    rows,
    scatter_to,
)
from headrace.tensor_parallel.sequence.tokens import Tokens
from headrace.training.shared_buffers.batch_norm import synchronise_batch_norm
from headrace.trees import map_tensors

Length = Callable[[], int]
"""Returns how long a whole value is along the dim where slices may differ by one."""


class SharedInput:
    """The input of layers that are split by their outputs, which several of them may share.

    Gradients of one value are summed over ranks once, however many layers it goes to. `split` is the dim along which
    the value is split already, or None; `length` is that of the whole along it, None where all slices are alike. Of a
    value between blocks each rank may have some `tokens`, which this `gathers` where the block has not.
    """

    def __init__(
        self,
        group: Collective,
        users: int = 1,
        split: int | None = None,
        length: Length | None = None,
        tokens: Tokens | None = None,
        gathers: bool = False,
    ) -> None:
        self._tokens, self._gathers = tokens, gathers
        self._group = group
        self._users = users
        self._split = split
        self._length = length
        self._came: Tensor | None = None
        self._inside: Tensor | None = None
        self._left = 0

    def enter(self, x: Tensor) -> Tensor:
        """Returns the whole value, with gradients that are summed."""
        if self._tokens and self._tokens.holds(x):
            return x
        inside = self._inside
        if self._came is not x or inside is None:
            self._left = self._users
            if self._tokens and self._gathers:
                inside = self._tokens.gather(x)
            elif self._split is None:
                inside = copy_to(x, self._group)
            else:
                inside = all_gather_to(x, self._split, self._group, self._length() if self._length else None)
        self._left -= 1
        # After the last user, activations are released.
        self._came, self._inside = (x, inside) if self._left > 0 else (None, None)
        return inside


class ColumnParallel:
    """A linear layer or convolution of which each rank has some of the outputs.

    Of a convolution in groups each rank has some groups: AlexNet's two towers (Krizhevsky et al., 2012, 3.2). `enter`
    makes of the input what this rank's part needs of it.
    """

    def __init__(
        self,
        layer: nn.Module,
        group: Collective,
        enter: Callable[[Tensor], Tensor],
        gathers: bool,
        tokens: Tokens | None = None,
    ) -> None:
        self._layer = layer
        self._saving = tokens.saving if tokens else nullcontext
        groups = layer.groups // group.world if isinstance(layer, ConvNd) and layer.groups > 1 else None
        self._weighted = _weighted(layer, groups)
        self._group = group
        self._enter = enter
        self._gathered = feature_dim(layer) if gathers else None

    def __call__(self, input: Tensor) -> Tensor:
        entered = self._enter(input)
        with self._saving(entered):
            own = self._weighted(entered, self._layer.weight, self._layer.bias)
        return own if self._gathered is None else gather_from(own, self._gathered, self._group)


class RowParallel:
    """A linear layer or convolution of which each rank has the weights of some of the inputs.

    Where `tokens` is a dim, each rank gets its slice along it of the outputs.
    """

    def __init__(self, layer: nn.Module, group: Collective, scatters: bool, tokens: int | None = None) -> None:
        self._layer, self._tokens = layer, tokens
        self._weighted = _weighted(layer)
        self._group = group
        self._features = feature_dim(layer)
        self._scatters = scatters

    def __call__(self, input: Tensor) -> Tensor:
        own = scatter_to(input, self._features, self._group) if self._scatters else input
        part = self._weighted(own, self._layer.weight, None)
        if self._tokens is None:
            total = reduce_from(part, self._group)
        else:
            total = reduce_scatter_from(part, self._tokens, self._group)
        bias = self._layer.bias
        if not isinstance(bias, Tensor):
            return total
        # Of the type that autocast computes in.
        return total + bias.to(total.dtype).view(-1, *[1] * (-1 - self._features))


class ParallelEmbedding:
    """An embedding of which each rank has some of the vectors, or a part of every vector."""

    def __init__(self, layer: nn.Embedding, group: Collective, by_rows: bool, gathers: bool = True) -> None:
        self._layer = layer
        self._group = group
        self._gathers = gathers
        self._rows = layer.num_embeddings // group.world if by_rows else 0
        self._first = group.rank * self._rows
        self._padding = layer.padding_idx
        if by_rows and self._padding is not None:
            # The rank that holds the padding vector gives it no gradient.
            own = self._padding - self._first
            self._padding = own if 0 <= own < self._rows else None

    def __call__(self, input: Tensor) -> Tensor:
        if not self._rows:
            own = F.embedding(input, self._layer.weight, self._padding)
            return gather_from(own, -1, self._group) if self._gathers else own
        own = input - self._first
        elsewhere = (own < 0) | (own >= self._rows)
        found = F.embedding(own.masked_fill(elsewhere, 0), self._layer.weight, self._padding)
        return reduce_from(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


class ParallelDropout:
    """Dropout of a value of which each rank has a slice: it draws for the whole, and takes its slice of that.

    So one device drops the same elements, and all ranks' generators go on alike.
    """

    def __init__(self, layer: nn.Dropout, dim: int, group: Collective, length: Length | None = None) -> None:
        self._layer = layer
        self._dim = dim
        self._group = group
        self._length = length

    def __call__(self, input: Tensor) -> Tensor:
        if not self._layer.training or self._layer.p == 0.0:
            return input
        return input * dropped(input, self._layer.p, self._dim, self._group, self._length)


def dropped(x: Tensor, p: float, dim: int, group: Collective, length: Length | None = None) -> Tensor:
    """Returns what the elements of a slice are multiplied by."""
    shape = list(x.shape)
    shape[dim] = length() if length else shape[dim] * group.world
    whole = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, training=True)
    return scatter_to(whole, dim, group)


def feature_dim(layer: nn.Module) -> int:
    """Returns which dim of its outputs a layer's features lie along, from behind."""
    return -1 - len(layer.kernel_size) if isinstance(layer, ConvNd) else -1


def is_transposed(layer: nn.Module) -> bool:
    """Returns whether it is the transformers library's `Conv1D`, a linear layer whose weight is `(inputs, outputs)`."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _weighted(layer: nn.Module, groups: int | None = None) -> Callable[..., Tensor]:
    """Returns what applies weights like a layer's: `(x, weight, bias)`."""
    if is_transposed(layer):
        return lambda x, weight, bias: F.linear(x, weight.t(), bias)
    if not isinstance(layer, ConvNd):
        return F.linear
    # All that a convolution is but its parameters: how it pads, for one.
    shape: Any = copy.copy(layer)
    internals.set_parameters(shape, dict.fromkeys(internals.parameters(layer)))
    if groups is not None:
        shape.groups = groups
    convolve: Callable[..., Tensor] = internals.convolution(shape)
    return convolve


class BatchParallel:
    """A module that is whole on every rank, where each computes some of the examples: data parallelism inside a model.

    Gradients of its parameters are summed over ranks in one piece (Krizhevsky, "One weird trick for parallelizing
    convolutional neural networks", 2014, section 4: so are convolutions parallel, and dense layers by their features).
    Raises a `UsageError` if a layer of it draws random numbers in a way of its own.
    """

    def __init__(self, module: nn.Module, group: Collective, gathers: bool, name: str) -> None:
        synchronise_batch_norm(module, group)
        for path, child in module.named_modules():
            if isinstance(child, (DropoutNd, nn.RReLU)) and type(child) is not nn.Dropout:
                raise UsageError(
                    f"'{name}.{path}' is a {type(child).__name__}, and of what it draws each device would draw "
                    "a part of its own, so that they no longer draw alike; use nn.Dropout, or leave it without 'batch'"
                )
            if type(child) is nn.Dropout:
                child.forward = ParallelDropout(child, 0, group, self.length)  # type: ignore[method-assign]
        self._body = Body(module)
        self._group = group
        self._gathers = gathers
        self._name = name
        self._length = 0

    def length(self) -> int:
        """Returns how many examples the last batch had."""
        return self._length

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._length = len(next(each for each in (*arguments, *named.values()) if isinstance(each, Tensor)))
        arguments, named = map_tensors(self._take_examples, (arguments, named))
        return map_tensors(self._gather_examples, self._body.run(self._group, arguments, named))

    def _take_examples(self, x: Tensor) -> Tensor:
        self._require(x, self._length, "is given")
        return scatter_to(x, 0, self._group)

    def _gather_examples(self, x: Tensor) -> Tensor:
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


class PartialModule:
    """A module that is whole on every rank, and is given another part of a value on each: gradients are summed."""

    def __init__(self, module: nn.Module, group: Collective) -> None:
        self._body = Body(module)
        self._group = group

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._body.run(self._group, arguments, named)


class Body(nn.Module):
    """A module as it was, with the same parameters in the same places."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        internals.share_state(self, module)
        self.forward = module.forward

    def run(
        self, group: Collective, arguments: tuple[Any, ...], named: dict[str, Any], names: frozenset[str] | None = None
    ) -> Any:
        """Returns what it returns; gradients of its parameters, or of some, are summed over ranks in one piece."""
        learned = {
            name: each
            for name, each in self.named_parameters()
            if each.requires_grad and (names is None or name in names)
        }
        entered = copy_all_to(tuple(learned.values()), group) if learned else ()
        return functional_call(self, dict(zip(learned, entered, strict=True)), arguments, named)
