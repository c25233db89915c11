"""Which layers of a model stand one behind the other, so that what goes from one to the next can be divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.tensor_parallel.layers import Body
from headrace.tensor_parallel.layout import Layout
from headrace.tensor_parallel.recording import Trial, tried
from headrace.tensor_parallel.sequence.tokens import INSTEAD, Tokens, first_of
from headrace.training.user_code.watching import Functions
from headrace.trees import map_tensors


@dataclass(frozen=True)
class Chain:
    """Layers one behind the other, between which values are divided.

    Attributes:
        layers: their names.
        dim: along which their values have tokens.
        drops: dropouts of divided values, by name.
    """

    layers: tuple[str, ...]
    dim: int
    drops: tuple[str, ...]


class DividedLayer:
    """A layer of a chain: takes and returns this rank's tokens, the first one takes and the last one returns all."""

    def __init__(
        self, name: str, layer: nn.Module, tokens: Tokens, names: frozenset[str], ends: tuple[bool, bool]
    ) -> None:
        self._name, self._tokens, self._names, self._ends = name, tokens, names, ends
        self._body = Body(layer)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        tokens, (first, last) = self._tokens, self._ends
        x = first_of((*arguments, *named.values()))
        if x is None or not (first or tokens.has_own(x)):
            raise UsageError(
                f"{self._name!r} is given {'no value with tokens' if x is None else tuple(x.shape)}, and sequence=True "
                f"divides what goes from layer to layer; {INSTEAD}"
            )
        if first:
            own = tokens.scatter(x)
            arguments, named = map_tensors(lambda each: own if each is x else each, (arguments, named))
        output = self._body.run(tokens.group, arguments, named, self._names)
        y = output if isinstance(output, Tensor) else output[0]
        if not last:
            return output
        whole = tokens.join(y)
        return map_tensors(lambda each: whole if each is y else each, output)


def gather_for(block: nn.Module, tokens: Tokens) -> None:
    """Lets a split block get all tokens of the value that it is given."""

    def gather(_: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any] | None:
        x = first_of((*arguments, *named.values()))
        if x is None or not tokens.has_own(x):
            raise UsageError(
                f"a split block, a {type(block).__name__}, is given "
                f"{'no value with tokens' if x is None else tuple(x.shape)} first, and sequence=True divides those "
                f"between blocks; {INSTEAD}"
            )
        whole = tokens.gather(x)
        changed: tuple[Any, Any] = map_tensors(lambda each: whole if each is x else each, (arguments, named))
        return changed

    block.register_forward_pre_hook(gather, prepend=True, with_kwargs=True)


def require_ends(module: nn.Module, every: Sequence[Tokens]) -> None:
    """Lets a forward that has left a chain before its last layer fail, since the rest of it would see some tokens."""

    def look(*_: object) -> None:
        if any(tokens.open for tokens in every):
            raise UsageError(
                "the last of the layers between which sequence=True divides values was not called, so that what comes "
                f"after it would have some of the tokens; {INSTEAD}"
            )

    module.register_forward_hook(look)


def find_chains(module: nn.Module, layout: Layout, trial: Trial) -> tuple[Chain, ...]:
    """Returns what of a model can be divided between its split blocks.

    Raises:
        UsageError: there is nothing, or what is between blocks draws random numbers in a way of its own.
    """
    flow, kinds = layout.flow, layout.kinds
    lists = [
        [f"{name}.{each}" for each, _ in part.named_children()]
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and name
    ]
    found: list[Chain] = []
    for layers in lists:
        inside = [[each for each in kinds if each.startswith(f"{layer}.")] for layer in layers]
        paired = all(
            each not in flow.gathers
            and (kinds[each] not in ("row", "column") or kinds[each] == "column" or flow.takes[each])
            for every in inside
            for each in every
        )
        ends = all(any(kinds[each] in ("row", "heads") for each in every) for every in inside)
        nested = any(layers[0].startswith(f"{each}.") for chain in found for each in chain.layers) if layers else True
        if layers and paired and ends and not nested:
            found.append(_watched(module, layers, flow.drops, trial))
    if not found:
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in layout.obstacles.items())
        raise UsageError(
            "sequence=True divides values between the split blocks of layers that stand in a list (nn.ModuleList, "
            f"nn.Sequential), and the model has no such list{f': {reasons:.200}' if reasons else ''}; {INSTEAD}"
        )
    return tuple(found)


def _watched(module: nn.Module, layers: list[str], drops: Mapping[str, str], trial: Trial) -> Chain:
    """Returns a chain of layers, by what they do in a trial."""
    shapes: set[tuple[int, ...]] = set()
    dropped: dict[str, tuple[int, ...]] = {}
    alone: list[str] = []
    running: list[nn.Dropout] = []
    every = {layer: module.get_submodule(layer) for layer in layers}
    outer = any(
        isinstance(each, nn.MultiheadAttention) and not each.batch_first
        for layer in every.values()
        for each in layer.modules()
    )

    def seen(func: Any, args: Any, kwargs: Any, output: Any) -> None:
        name = getattr(func, "__name__", "")
        draws = name.endswith("dropout") or name in ("rand_like", "randn_like", "bernoulli")
        if draws and not running and isinstance(output, Tensor) and tuple(output.shape) in shapes:
            active = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
            if active.get("p", 0.5) and active.get("training", True):
                alone.append(name)

    with ExitStack() as stack:
        stack.enter_context(tried(module, seed=True))
        module.train()
        for layer in every.values():
            stack.callback(layer.register_forward_pre_hook(_noting(shapes), with_kwargs=True).remove)
            for name, part in layer.named_modules():
                if type(part) is nn.Dropout:
                    path = next(f"{one}.{name}" for one, other in every.items() if other is layer)
                    stack.callback(part.register_forward_pre_hook(_drop_noting(dropped, path, running)).remove)
                    stack.callback(part.register_forward_hook(lambda *_: running.clear()).remove)
        with torch.no_grad(), Functions(seen):
            trial.run(module)
    if alone:
        raise UsageError(
            f"{alone[0]} between the split blocks of {layers[0]!r} draws random numbers by a function, and under "
            f"sequence=True each device would draw for other tokens; use nn.Dropout, or {INSTEAD}"
        )
    own = tuple(name for name, shape in dropped.items() if shape in shapes and not drops.get(name))
    return Chain(tuple(layers), 0 if outer else 1, own)


def _noting(shapes: set[tuple[int, ...]]) -> Callable[..., None]:
    def note(_: nn.Module, arguments: Any, named: Any) -> None:
        if (x := first_of((*arguments, *named.values()))) is not None:
            shapes.add(tuple(x.shape))

    return note


def _drop_noting(dropped: dict[str, tuple[int, ...]], path: str, running: list[nn.Dropout]) -> Callable[..., None]:
    def note(part: nn.Module, arguments: Any) -> None:
        assert isinstance(part, nn.Dropout)
        running.append(part)
        dropped[path] = tuple(arguments[0].shape)

    return note
