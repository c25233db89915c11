"""From autograd's gradients to the flat memory that workers exchange, without a loop over parameters."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from headrace import internals
from headrace.collectives.base import ProcessGroup
from headrace.internals import foreach_copy_, foreach_div_, foreach_zero_
from headrace.shared_memory.layout import LINE, on_lines
from headrace.spec.model import ITEM_BYTES, ParameterSpec

_FEWEST_ELEMENTS = 1 << 18
"""Of a weight whose gradient is written in place; for fewer a function in Python takes longer than the copy."""


@dataclass(frozen=True)
class ByteRange:
    """The bytes `[start, stop)` that hold elements of one type."""

    dtype: torch.dtype
    start: int
    stop: int

    def of(self, region: Tensor) -> Tensor:
        """Returns this range of a `(nbytes,)` uint8 region, flat, in its own type."""
        return region[self.start : self.stop].view(self.dtype)

    def part(self, rank: int, world: int) -> ByteRange:
        """Returns the rank-th of `world` nearly equal parts, cut where cache lines begin."""
        lines = on_lines(self.stop - self.start) // LINE
        low = self.start + lines * rank // world * LINE
        high = self.start + lines * (rank + 1) // world * LINE
        return ByteRange(self.dtype, min(low, self.stop), min(high, self.stop))


class FlatLayout:
    """The place of every parameter in one flat region, aligned to cache lines, those of one type side by side.

    `nbytes` is the length of the region; `spans` has one range for each type.
    """

    def __init__(self, parameters: Sequence[ParameterSpec]) -> None:
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._offsets: dict[str, int] = {}
        self.spans: tuple[ByteRange, ...] = ()
        position = 0
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            start = position
            for parameter in parameters:
                if parameter.dtype == dtype:
                    self._offsets[parameter.name] = position
                    position += on_lines(parameter.bytes)
            self.spans += (ByteRange(getattr(torch, dtype), start, position),)
        self.nbytes = position

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in order."""
        return tuple(self._parameters)

    def views(self, region: Tensor) -> tuple[Tensor, ...]:
        """Returns every parameter's place in a `(nbytes,)` uint8 region, in its shape and type, in order."""
        return tuple(self.view(region, name) for name in self._parameters)

    def view(self, region: Tensor, name: str) -> Tensor:
        """Returns one parameter's place, in its shape and type."""
        parameter = self._parameters[name]
        return in_order(self.flat(region, name), parameter.shape, parameter.channels_last)

    def runs(self, region: Tensor, start: int, stop: int) -> list[Tensor]:
        """Returns the places of the parameters `[start, stop)` as few flat pieces: one a type."""
        chosen = list(self._parameters.values())[start:stop]
        pieces = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in chosen):
            same = [parameter for parameter in chosen if parameter.dtype == dtype]
            end = self._offsets[same[-1].name] + on_lines(same[-1].bytes)
            pieces.append(region[self._offsets[same[0].name] : end].view(getattr(torch, dtype)))
        return pieces

    def flat(self, region: Tensor, name: str) -> Tensor:
        """Returns one parameter's place, flat."""
        parameter, start = self._parameters[name], self._offsets[name]
        stop = start + parameter.elements * ITEM_BYTES[parameter.dtype]
        return region[start:stop].view(getattr(torch, parameter.dtype))


def in_order(flat: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """Returns flat memory as a tensor of a shape, whose elements lie there in the usual or in channels-last order."""
    if not channels_last:
        return flat.view(shape)
    count, channels, height, width = shape
    return flat.view(count, height, width, channels).permute(0, 3, 1, 2)


class GradientSink(Protocol):
    """Takes the gradients of a backward pass."""

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes one gradient a trainable parameter; None where the loss does not depend on it."""

    def store_nothing(self) -> None:
        """Notes that this worker contributes nothing to this round."""


@runtime_checkable
class GradientPlaces(Protocol):
    """A sink that sends gradients from places of its own, to which a backward pass may write them."""

    def place(self, index: int) -> Tensor | None:
        """Returns where the gradient of a trainable parameter is sent from, in its shape and type, until `store`.

        None where there is no such place now; then the gradient is copied.
        """


@runtime_checkable
class EarlySink(Protocol):
    """A sink that, if `early`, takes gradients from `.grad` as soon as backward has made them."""

    early: bool

    def gather(self) -> None:
        """Takes what is in `.grad` to where it is sent from, for later passes to add to it there."""

    def sending(self, first: bool = True) -> AbstractContextManager[None]:
        """Lets one backward pass send early, whose gradients go to the sink as they are.

        Without `first`, parameters may have gradients that the pass adds to.
        """


class GradientUse(ABC):
    """Finds the trainable parameters that no worker has a gradient for in this round.

    One device skips a parameter that the loss does not depend on (no decay, no momentum). N workers do the same only
    if no worker's part of the batch depends on it, so they must tell each other.
    `meets_later` is the group whose ranks only `leave` has wait for each other; None where `settle` does.
    """

    meets_later: ProcessGroup | None = None

    @abstractmethod
    def publish(self, gradients: Sequence[Tensor | None]) -> bool:
        """Tells the others which of this worker's gradients are missing; returns whether none is."""

    @abstractmethod
    def publish_nothing(self) -> None:
        """Tells the others that this worker has no gradients."""

    @abstractmethod
    def settle(self) -> tuple[int, ...]:
        """Returns the indices of the parameters without any gradient, when all workers have published."""

    def leave(self) -> None:  # noqa: B027  (nothing, where `settle` has waited for the others)
        """Waits until all workers have come to `settle`."""


class UsedParameters(GradientUse):
    """Finds them by what the hosts of workers tell each other, who have `shares` of a batch."""

    def __init__(self, group: ProcessGroup, count: int, shares: int | None = None) -> None:
        self._group, self.shares = group, shares or group.world
        shares = group.one_memory
        regions = group.share(count + 1) if shares else (torch.zeros(count + 1, dtype=torch.uint8),)
        # By rank: whether a gradient is missing, and which.
        self._regions = [region.numpy() for region in regions]
        self._own = self._regions[group.rank if shares else 0]

    def publish(self, gradients: Sequence[Tensor | None]) -> bool:
        complete = not any(map(operator.is_, gradients, repeat(None)))
        if not complete:
            self._own[1:] = [gradient is None for gradient in gradients]
        self._own[0] = not complete
        return complete

    def publish_nothing(self) -> None:
        self._own[:] = 1

    def settle(self) -> tuple[int, ...]:
        if not self._group.one_memory:
            return self._settle_by_collective()
        self._group.barrier()
        if not all(region[0] for region in self._regions):
            return ()
        missing = self._regions[0][1:].copy()
        for region in self._regions[1:]:
            missing &= region[1:]
        return tuple(int(index) for index in missing.nonzero()[0])

    def _settle_by_collective(self) -> tuple[int, ...]:
        (incomplete,) = self._group.sum([float(self._own[0])])
        if incomplete < self._group.world:
            return ()
        missing = torch.from_numpy(self._own[1:].astype("int32"))
        self._group.all_reduce(missing)
        return tuple((missing == self._group.world).nonzero().flatten().tolist())


class FlatGradients:
    """Stores one worker's gradients side by side in a `(layout.nbytes,)` uint8 region, and publishes which exist."""

    def __init__(self, layout: FlatLayout, region: Tensor, used: UsedParameters) -> None:
        self._layout = layout
        self.move(region, used)

    def move(self, region: Tensor, used: UsedParameters) -> None:
        """Stores them in another region from now on, as the members of the group have changed."""
        self._views = self._layout.views(region)
        self._region = region
        self._used = used

    def place(self, index: int) -> Tensor:
        """See `GradientPlaces`."""
        # The others have read the last ones before they decided about the last step.
        return self._views[index]

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        if self._used.publish(gradients):
            # Those that backward has not written to their places.
            made = zip(self._views, cast(Sequence[Tensor], gradients), strict=True)
            copied = [(view, gradient) for view, gradient in made if gradient is not view]
            # A stage of a pipeline may have no parameter to train, and torch takes no empty lists.
            if copied:
                views, sources = zip(*copied, strict=True)
                foreach_copy_(views, sources)
            return
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient)

    def store_nothing(self) -> None:
        self._used.publish_nothing()
        self._region.zero_()


class SharedGradients:
    """The gradients of all workers of a host, by rank, each a `(layout.nbytes,)` uint8 region that all see."""

    def __init__(self, trainable: Sequence[ParameterSpec], group: ProcessGroup) -> None:
        self.layout = FlatLayout(trainable)
        self._group = group
        self._share()
        self.sink = FlatGradients(self.layout, self.regions[group.rank], self.used)

    def regroup(self) -> None:
        """Goes on with the group's present members, whose gradients lie elsewhere; every member calls it."""
        self._share()
        self.sink.move(self.regions[self._group.rank], self.used)

    def _share(self) -> None:
        self.regions = self._group.share(self.layout.nbytes)
        self.used = UsedParameters(self._group, len(self.layout.names))

    def views(self) -> list[tuple[Tensor, ...]]:
        """Returns every worker's gradients, by rank, in the parameters' shapes and order."""
        return [self.layout.views(region) for region in self.regions]


def assign(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], missing: Sequence[int] = ()) -> None:
    """Puts each parameter's gradient into `.grad`, except those of the missing parameters."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for index in missing:
        parameters[index].grad = None


def times(gradients: Sequence[Tensor | None], factor: float) -> list[Tensor | None]:
    """Returns gradients times a factor, in new memory."""
    return [None if gradient is None else gradient * factor for gradient in gradients]


def divide(gradients: Sequence[Tensor | None], weight: float | Tensor) -> None:
    """Divides gradients that micro-batches have added up by the weight of all; without any weight they are 0."""
    present = [gradient for gradient in gradients if gradient is not None]
    if isinstance(weight, Tensor):
        for gradient in present:
            gradient.div_(torch.where(weight == 0, 1.0, weight).to(gradient.dtype)).masked_fill_(weight == 0, 0.0)
    elif present:
        foreach_div_(present, weight) if weight else foreach_zero_(present)


class DirectGradients:
    """Makes large linear layers write the gradients of their weights to the places of a sink.

        forward              y = linear(x, weight)
        backward             mm(g.T, x, out=place)         without: gradient = mm(g.T, x); place.copy_(gradient)

    The product is the one that autograd makes, so every bit is the same. A place is written to once in a pass: where a
    weight has several gradients, autograd adds them up in new memory.
    """

    def __init__(self, module: nn.Module, trained: Sequence[Tensor], sink: GradientPlaces) -> None:
        indices = {id(parameter): index for index, parameter in enumerate(trained)}
        self._sink = sink
        self._layers = [
            (layer, indices[id(layer.weight)])
            for layer in module.modules()
            if type(layer) is nn.Linear and id(layer.weight) in indices
        ]
        self._layers = [
            (layer, index)
            for layer, index in self._layers
            if layer.weight.numel() >= _FEWEST_ELEMENTS
            and layer.weight.device.type == "cpu"
            and layer.weight.is_floating_point()
            and sink.place(index) is not None
        ]
        self._unwritten: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Has the layers called in this way, in forward and in what backward computes again."""
        # One that has a forward of its own keeps it.
        layers = [(layer, index) for layer, index in self._layers if "forward" not in vars(layer)]
        for layer, index in layers:
            vars(layer)["forward"] = partial(self._call, layer, index)
        try:
            yield
        finally:
            for layer, _ in layers:
                del vars(layer)["forward"]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lets one backward pass write, whose gradients go to the sink as they are."""
        self._unwritten.update(index for _, index in self._layers)
        try:
            yield
        finally:
            self._unwritten.clear()

    def take(self, index: int) -> Tensor | None:
        """Returns where to write a gradient; None if it is to be made in new memory."""
        # With a graph of its own, it is not the gradient that goes to the sink.
        if index not in self._unwritten or torch.is_grad_enabled():
            return None
        self._unwritten.remove(index)
        return self._sink.place(index)

    def _call(self, layer: nn.Linear, index: int, *values: Any, **named: Any) -> Any:
        if len(values) == 1 and not named and _is_plain(values[0], layer.weight):
            return _DirectLinear.apply(values[0], layer.weight, layer.bias, self, index)  # type: ignore[no-untyped-call]
        return nn.Linear.forward(layer, *values, **named)


class _DirectLinear(torch.autograd.Function):
    """A linear layer whose weight's gradient is written where `DirectGradients` says."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, gradients: DirectGradients, index: int
    ) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.gradients, ctx.index = gradients, index
        return functional.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        for_value, for_weight, for_bias = ctx.needs_input_grad[:3]
        rows = gradient.reshape(-1, gradient.shape[-1])
        back = gradient @ weight if for_value else None
        made = None
        if for_weight:
            inputs = value.reshape(-1, value.shape[-1])
            place = ctx.gradients.take(ctx.index)
            made = rows.T @ inputs if place is None else torch.mm(rows.T, inputs, out=place)
        return back, made, rows.sum(0) if for_bias else None, None, None


def _is_plain(value: Any, weight: Tensor) -> bool:
    """Tells whether a layer's call is one that `_DirectLinear` computes as torch does."""
    if type(value) is not Tensor or type(weight) is not nn.Parameter or value.dtype != weight.dtype:
        return False
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return False
    # Of several dims that are not contiguous, torch makes another product, whose last bits differ.
    if value.dim() != 2 and not (value.dim() > 2 and value.is_contiguous()):
        return False
    # A hook may keep the gradient that it is given.
    if internals.gradient_hooks(weight) or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    # Transforms of functions, and derivatives in the forward direction, need rules of their own.
    return not internals.functorch_active() and internals.forward_level(forward_ad) < 0
