"""From a model's layers to this rank's parts of them, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from headrace import internals
from headrace.collectives.base import Collective
from headrace.errors import UsageError
from headrace.internals import ConvNd
from headrace.tensor_parallel.attention import ParallelAttention
from headrace.tensor_parallel.collectives import scatter_to
from headrace.tensor_parallel.layers import (
    BatchParallel,
    ColumnParallel,
    Length,
    ParallelDropout,
    ParallelEmbedding,
    PartialModule,
    RowParallel,
    SharedInput,
    feature_dim,
    is_transposed,
)
from headrace.tensor_parallel.layout import Layout
from headrace.tensor_parallel.replica import ShardDim
from headrace.tensor_parallel.sequence.chains import Chain, DividedLayer, gather_for, require_ends
from headrace.tensor_parallel.sequence.tokens import Tokens


class Rewriter:
    """Gives layers parts of their parameters, and what they do with them."""

    def __init__(self, module: nn.Module, group: Collective, layout: Layout, chains: Sequence[Chain] = ()) -> None:
        self._module = module
        self._group = group
        self._flow = layout.flow
        self._kinds = layout.kinds
        self._layers = layout.layers
        self._batches = layout.batches
        self._blocks = layout.blocks
        self._matrices = {name: count for block in layout.blocks for name, count in block.columns.items()}
        # With the whole ones, whose ids no other tensor may get meanwhile.
        self._made: dict[int, tuple[nn.Parameter, ShardDim, nn.Parameter]] = {}
        self._shared: dict[tuple[int, str], SharedInput] = {}
        self._length: Length | None = None
        self._chains = [(chain, Tokens(group, chain.dim)) for chain in chains]
        # Of blocks that are in a layer, not layers themselves: what is between them is divided.
        layers = {layer for chain in chains for layer in chain.layers}
        self._closed = [
            *(block.name for block in layout.blocks if block.name not in layers),
            *(name for name, kind in layout.kinds.items() if kind == "heads"),
        ]

    def cut(self) -> dict[str, ShardDim]:
        """Splits; returns how parameters were cut, by name."""
        for module, name in self._batches.items():
            parallel = BatchParallel(module, self._group, name in self._flow.gathers, name)
            self._length = parallel.length
            module.forward = parallel
        for part in self._module.modules():
            if isinstance(part, nn.TransformerEncoder):
                # Nested tensors are for kernels that want whole weights.
                part.use_nested_tensor = False
            if isinstance(part, nn.TransformerEncoderLayer):
                # In evaluation it goes round its layers, and attention, to kernels for whole weights; not round hooks.
                part.register_forward_pre_hook(_nothing)
        for block in self._blocks:
            for attribute, value in block.numbers.items():
                setattr(self._module.get_submodule(block.name), attribute, value)
            if (tokens := self._tokens_of(block.name)) and block.name in self._closed:
                gather_for(self._module.get_submodule(block.name), tokens)
            for name in block.partial:
                partial = self._module.get_submodule(name)
                partial.forward = PartialModule(partial, self._group)
        for name in self._kinds:
            layer = self._module.get_submodule(name)
            layer.forward = self._split(name, layer)
        for name, axis in self._flow.drops.items():
            if axis:
                self._drop(name, axis)
        cuts = {id(part): cut for _, cut, part in self._made.values()}
        named = dict(self._module.named_parameters())
        self._divide({name for name, parameter in named.items() if id(parameter) in cuts})
        for name, parameter in named.items():
            if id(parameter) in self._made:
                raise UsageError(
                    f"{name!r} belongs to several layers, of which one is split and another is whole; give all of "
                    "them rules that cut it alike (an embedding 'row' and the linear layer tied to it 'column'), or "
                    "'replicate' to all"
                )
        return {name: cuts[id(parameter)] for name, parameter in named.items() if id(parameter) in cuts}

    def _divide(self, cut: Collection[str]) -> None:
        """Lets the layers of chains take and return some tokens."""
        biases = {f"{name}.bias" for name, kind in self._kinds.items() if kind == "row"}
        biases |= {f"{name}.out_proj.bias" for name, kind in self._kinds.items() if kind == "heads"}
        if self._chains:
            require_ends(self._module, [tokens for _, tokens in self._chains])
        for chain, tokens in self._chains:
            for name in chain.drops:
                layer = self._module.get_submodule(name)
                assert isinstance(layer, nn.Dropout)
                layer.forward = ParallelDropout(  # type: ignore[method-assign]
                    layer, chain.dim, self._group, tokens.length
                )
            for place, name in enumerate(chain.layers):
                part = self._module.get_submodule(name)
                whole = frozenset(
                    each
                    for each, _ in part.named_parameters()
                    if (path := f"{name}.{each}") not in cut and (path in biases or not self._is_closed(path))
                )
                ends = place == 0, place == len(chain.layers) - 1
                part.forward = DividedLayer(name, part, tokens, whole, ends)

    def _tokens_of(self, name: str) -> Tokens | None:
        """Returns those of the chain that a layer is in."""
        every = ((tokens, each) for chain, tokens in self._chains for each in chain.layers)
        return next((tokens for tokens, each in every if f"{name}.".startswith(f"{each}.")), None)

    def _is_closed(self, name: str) -> bool:
        """Tells whether something is in a block, which gets all tokens."""
        return any(name.startswith(f"{each}.") for each in self._closed)

    def _split(self, name: str, layer: nn.Module) -> Callable[..., Any]:
        kind, takes, group = self._kinds[name], self._flow.takes[name], self._group
        tokens = self._tokens_of(name)
        gathers = name in self._flow.gathers
        if isinstance(layer, nn.MultiheadAttention):
            self._cut(layer, in_proj_weight=ShardDim(0, blocks=3), in_proj_bias=ShardDim(0, blocks=3))
            self._cut(layer.out_proj, weight=ShardDim(1))
            # Inside, examples are the first dim.
            dim = 1 if tokens else None
            layer.out_proj.forward = RowParallel(  # type: ignore[method-assign]
                layer.out_proj, group, scatters=False, tokens=dim
            )
            layer.register_forward_pre_hook(_nothing)
            if tokens:
                gather_for(layer, tokens)
            return ParallelAttention(layer, group, tokens)
        if isinstance(layer, nn.Embedding):
            self._cut(layer, weight=ShardDim(0 if kind == "row" else 1))
            return ParallelEmbedding(layer, group, kind == "row", name not in self._matrices)
        by_inputs, by_outputs = (0, 1) if is_transposed(layer) else (1, 0)
        if kind == "row":
            self._cut(layer, weight=ShardDim(by_inputs))
            return RowParallel(layer, group, scatters=not takes, tokens=tokens.dim if tokens else None)
        matrices = self._matrices.get(name, 1)
        self._cut(layer, weight=ShardDim(by_outputs, matrices), bias=ShardDim(0, matrices))
        if not isinstance(layer, ConvNd) or layer.groups == 1:
            return ColumnParallel(layer, group, self._shared_input(name, layer, takes).enter, gathers, tokens)
        dim = feature_dim(layer)
        return ColumnParallel(layer, group, lambda x: x if takes else scatter_to(x, dim, group), gathers)

    def _shared_input(self, name: str, layer: nn.Module, takes: str) -> SharedInput:
        """Returns one for all layers that take the same value."""
        step, tokens = self._flow.sources.get(name, -1), self._tokens_of(name)
        if step < 0:
            return SharedInput(self._group, tokens=tokens, gathers=not self._is_closed(name))
        # Only layers that are split by their outputs share an input.
        mates = [
            other
            for other, came in self._flow.sources.items()
            if came == step
            and self._kinds[other] in ("column", "channels")
            and self._layers[other].sort in ("linear", "convolution")
        ]
        dim = {"": None, "batch": 0}.get(takes, feature_dim(layer))
        length = self._length if takes == "batch" else None
        return self._shared.setdefault(
            (step, takes),
            SharedInput(self._group, len(mates), dim, length, tokens, gathers=not self._is_closed(name)),
        )

    def _drop(self, name: str, axis: str) -> None:
        layer = self._module.get_submodule(name)
        assert isinstance(layer, nn.Dropout)
        dim = {"batch": 0, "channels": 1, "features": -1}[axis]
        length = self._length if axis == "batch" else None
        layer.forward = ParallelDropout(layer, dim, self._group, length)  # type: ignore[method-assign]

    def _cut(self, layer: nn.Module, **cuts: ShardDim) -> None:
        """Gives a layer this rank's parts of its parameters; of one that several layers have, the same part to each."""
        for name, cut in cuts.items():
            whole = internals.parameters(layer)[name]
            if whole is None:
                continue
            known = self._made.get(id(whole))
            if known is None:
                with torch.no_grad():
                    own = cut.take(whole, self._group.rank, self._group.world).clone()
                known = self._made[id(whole)] = whole, cut, nn.Parameter(own, requires_grad=whole.requires_grad)
            elif known[1] != cut:
                raise UsageError(
                    "two layers have one parameter, and their rules cut it along different dims; use rules that cut it "
                    "alike (an embedding by 'row' and the linear layer tied to it by 'column'), or 'replicate' for both"
                )
            internals.parameters(layer)[name] = known[2]


def _nothing(*_: object) -> None:
    """Changes no input."""
