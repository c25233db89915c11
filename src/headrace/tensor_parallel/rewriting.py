"""From a whole model to one of which each device holds a part, in place, and from parts of tensors to whole ones."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from headrace.collectives.base import Collective
from headrace.errors import UnknownName, UsageError
from headrace.tensor_parallel.analysis import analyze_graph, splittable
from headrace.tensor_parallel.attention import ParallelAttention
from headrace.tensor_parallel.collectives import scatter_to
from headrace.tensor_parallel.layers import (
    BatchParallel,
    ColumnParallel,
    Length,
    ParallelDropout,
    ParallelEmbedding,
    RowParallel,
    SharedInput,
    feature_dim,
)
from headrace.tensor_parallel.replica import RewrittenModel, ShardDim
from headrace.tensor_parallel.rules import KINDS, Flow, Splittable, choose, follow

RULES = ("column", "row", "channels", "heads", "batch", "replicate")
"""What may be said of a layer: see `TensorParallel`."""

Rules = str | Mapping[str, str]


def split(module: nn.Module, rules: Rules, group: Collective) -> RewrittenModel:
    """Splits a model's layers in place; all ranks call it with the same model.

    `rules` are "auto", or names and patterns of layers with a rule each; the first that fits is taken. Raises a
    `UsageError` if a rule fits no layer, or cannot be followed with so many devices.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    found = splittable(module)
    layers = {name: form for name, (_, form) in found.items()}
    batches = _parts(module, rules)
    tied = _tied(module)
    if rules == "auto":
        free = {name: form for name, form in layers.items() if not tied & _own(found[name][0])}
        steps = analyze_graph(module, free, ())
        kinds = choose(steps, free, group.world)
    else:
        assert not isinstance(rules, str)
        kinds = _given(rules, module, layers, batches, group.world)
        steps = analyze_graph(module, kinds, batches.values())
    flow = follow(steps, layers, kinds)
    cuts = _Rewriter(module, group, flow, kinds, layers, batches).cut()
    return RewrittenModel(module, group, cuts, shapes, {**kinds, **dict.fromkeys(batches.values(), "batch")})


def _parts(module: nn.Module, rules: Rules) -> dict[nn.Module, str]:
    if isinstance(rules, str):
        return {}
    found: dict[nn.Module, str] = {}
    for pattern, kind in rules.items():
        if kind == "batch":
            chosen = [name for name in dict(module.named_modules()) if name and fnmatch.fnmatchcase(name, pattern)]
            if not chosen:
                raise UnknownName("module", pattern, [name for name, _ in module.named_modules() if name])
            # Not its children too, which are in it.
            outer = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
            found |= {module.get_submodule(name): name for name in outer}
    return found


def _given(
    rules: Mapping[str, str],
    module: nn.Module,
    layers: Mapping[str, Splittable],
    batches: Mapping[nn.Module, str],
    world: int,
) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for pattern, kind in rules.items():
        if kind not in RULES:
            raise UnknownName("rule", kind, RULES)
        chosen = [name for name in layers if fnmatch.fnmatchcase(name, pattern)]
        if kind != "batch" and not chosen:
            _refuse_pattern(pattern, kind, module, layers)
        if kind == "batch":
            chosen = [name for name in layers if any(name == b or name.startswith(f"{b}.") for b in batches.values())]
        for name in chosen:
            kinds.setdefault(name, kind)
    for name, kind in kinds.items():
        if kind not in ("batch", "replicate"):
            _check(name, kind, layers[name], world)
    return {name: kind for name, kind in kinds.items() if kind not in ("batch", "replicate")}


def _refuse_pattern(pattern: str, kind: str, module: nn.Module, layers: Mapping[str, Splittable]) -> None:
    others = [name for name, _ in module.named_modules() if fnmatch.fnmatchcase(name, pattern)]
    if not others:
        raise UnknownName("layer", pattern, layers)
    form = type(module.get_submodule(others[0])).__name__
    raise UsageError(
        f"{others[0]!r} is a {form}, which cannot be split; rules={{{pattern!r}: {kind!r}}} is for linear layers, "
        "convolutions, embeddings and nn.MultiheadAttention; leave it out, or use 'batch', which computes some of the "
        "examples on every device"
    )


def _check(name: str, kind: str, layer: Splittable, world: int) -> None:
    if kind not in KINDS[layer.sort]:
        known = " or ".join(repr(each) for each in KINDS[layer.sort])
        sort = {"grouped": "a convolution in groups", "convolution": "a convolution"}.get(layer.sort)
        sort = sort or f"{'an' if layer.sort[0] in 'ae' else 'a'} {layer.sort} layer"
        raise UsageError(f"{name!r} is {sort}, which cannot be split by {kind!r}; use {known}")
    if not layer.divisible(kind, world):
        count = layer.count(kind)
        what = {"heads": "heads", "row": "inputs"}.get(kind, "groups" if layer.sort == "grouped" else "outputs")
        fits = [str(number) for number in range(2, count + 1) if count % number == 0][:5]
        raise UsageError(
            f"{name!r} has {count} {what}, which {world} devices cannot share evenly; use "
            f"{' or '.join(fits) or 1} devices, or rules={{{name!r}: 'replicate', ...}}"
        )


def _tied(module: nn.Module) -> set[int]:
    """Returns which parameters several layers have."""
    seen, tied = set[int](), set[int]()
    for layer in module.modules():
        for parameter in layer._parameters.values():
            if parameter is not None:
                (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _own(layer: nn.Module) -> set[int]:
    return {id(parameter) for parameter in layer.parameters()}


class _Rewriter:
    """Gives layers parts of their parameters, and what they do with them."""

    def __init__(
        self,
        module: nn.Module,
        group: Collective,
        flow: Flow,
        kinds: Mapping[str, str],
        layers: Mapping[str, Splittable],
        batches: Mapping[nn.Module, str],
    ) -> None:
        self._module = module
        self._group = group
        self._flow = flow
        self._kinds = kinds
        self._layers = layers
        self._batches = batches
        # With the whole ones, whose ids no other tensor may get meanwhile.
        self._made: dict[int, tuple[nn.Parameter, ShardDim, nn.Parameter]] = {}
        self._shared: dict[tuple[int, str], SharedInput] = {}
        self._length: Length | None = None

    def cut(self) -> dict[str, ShardDim]:
        """Splits; returns how parameters were cut, by name."""
        for module, name in self._batches.items():
            part = BatchParallel(module, self._group, name in self._flow.gathers, name)
            self._length = part.length
            module.forward = part
        for encoder in self._module.modules():
            if isinstance(encoder, nn.TransformerEncoder):
                # Nested tensors are for kernels that want whole weights.
                encoder.use_nested_tensor = False
        for name in self._kinds:
            layer = self._module.get_submodule(name)
            layer.forward = self._split(name, layer)
        for name, axis in self._flow.drops.items():
            if axis:
                self._drop(name, axis)
        cuts = {id(part): cut for _, cut, part in self._made.values()}
        named = dict(self._module.named_parameters())
        for name, parameter in named.items():
            if id(parameter) in self._made:
                raise UsageError(
                    f"{name!r} belongs to several layers, of which one is split and another is whole; give all of "
                    "them rules that cut it alike (an embedding 'row' and the linear layer tied to it 'column'), or "
                    "'replicate' to all"
                )
        return {name: cuts[id(parameter)] for name, parameter in named.items() if id(parameter) in cuts}

    def _split(self, name: str, layer: nn.Module) -> Callable[..., Any]:
        kind, takes, group = self._kinds[name], self._flow.takes[name], self._group
        gathers = name in self._flow.gathers
        if isinstance(layer, nn.MultiheadAttention):
            self._cut(layer, in_proj_weight=ShardDim(0, blocks=3), in_proj_bias=ShardDim(0, blocks=3))
            self._cut(layer.out_proj, weight=ShardDim(1))
            layer.out_proj.forward = RowParallel(layer.out_proj, group, scatters=False)  # type: ignore[method-assign]
            return ParallelAttention(layer, group)
        if isinstance(layer, nn.Embedding):
            self._cut(layer, weight=ShardDim(0 if kind == "row" else 1))
            return ParallelEmbedding(layer, group, by_rows=kind == "row")
        if kind == "row":
            self._cut(layer, weight=ShardDim(1))
            return RowParallel(layer, group, scatters=not takes)
        self._cut(layer, weight=ShardDim(0), bias=ShardDim(0))
        if not isinstance(layer, _ConvNd) or layer.groups == 1:
            return ColumnParallel(layer, group, self._shared_input(name, layer, takes).enter, gathers)
        dim = feature_dim(layer)
        return ColumnParallel(layer, group, lambda x: x if takes else scatter_to(x, dim, group), gathers)

    def _shared_input(self, name: str, layer: nn.Module, takes: str) -> SharedInput:
        """Returns one for all layers that take the same value."""
        step = self._flow.sources.get(name, -1)
        if step < 0:
            return SharedInput(self._group)
        # Only layers that are split by their outputs share an input.
        mates = [other for other, came in self._flow.sources.items() if came == step and self._enters(other)]
        dim = {"": None, "batch": 0}.get(takes, feature_dim(layer))
        length = self._length if takes == "batch" else None
        return self._shared.setdefault((step, takes), SharedInput(self._group, len(mates), dim, length))

    def _enters(self, name: str) -> bool:
        return self._kinds[name] in ("column", "channels") and self._layers[name].sort in ("linear", "convolution")

    def _drop(self, name: str, axis: str) -> None:
        layer = self._module.get_submodule(name)
        assert isinstance(layer, nn.Dropout)
        dim = {"batch": 0, "channels": 1, "features": -1}[axis]
        length = self._length if axis == "batch" else None
        layer.forward = ParallelDropout(layer, dim, self._group, length)  # type: ignore[method-assign]

    def _cut(self, layer: nn.Module, **cuts: ShardDim) -> None:
        """Gives a layer this rank's parts of its parameters; of one that several layers have, the same part to each."""
        for name, cut in cuts.items():
            whole = layer._parameters[name]
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
            layer._parameters[name] = known[2]
