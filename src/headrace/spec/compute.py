"""What a training step of a model takes on one device: measured, or as a person has written it."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from functools import cached_property

from headrace.errors import UsageError


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model that is cut into stages, as it was measured on a micro-batch.

    Attributes:
        parameters: names of those that it uses; several layers use a tied one.
        saved_bytes: what autograd keeps for this layer's backward and for no layer before it.
        crossing_bytes: of all values that are alive behind it: what crosses a cut there.
        joined: whether no cut may follow it.
    """

    name: str
    parameters: tuple[str, ...]
    parameter_bytes: int
    forward_s: float
    backward_s: float
    saved_bytes: int
    crossing_bytes: int
    joined: bool = False


@dataclass(frozen=True)
class BatchProfile:
    """What a batch of so many examples takes on one device.

    Attributes:
        saved_bytes: what autograd keeps for backward at most.
        layers: the same by layer; () where the model was measured as a whole.
        workspace_bytes: that a training process has held besides its runtime, parameters, gradients, the optimizer's
            state and `saved_bytes`: temporary results, and memory that the allocator keeps.
    """

    examples: int
    forward_s: float
    backward_s: float
    saved_bytes: int = 0
    layers: tuple[LayerSpec, ...] = ()
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        _check_figures(self, f"the profile of {self.examples} examples")
        for layer in self.layers:
            _check_figures(layer, f"layer {layer.name} of the profile of {self.examples} examples")
        if self.examples < 1 or self.forward_s + self.backward_s <= 0:
            raise UsageError(
                f"the profile of {self.examples} examples takes {self.forward_s + self.backward_s:g} s; it needs at "
                "least one example, and a time above 0"
            )


@dataclass(frozen=True)
class ExpertTraffic:
    """What goes to the experts of a layer where they are divided.

    Attributes:
        count, chosen: how many there are, and how many of them a row goes to.
        rows: of one example.
        row_bytes: of a row there and back, and of the gradients of both.
        parameter_bytes: of all trained parameters of the experts.
    """

    count: int
    chosen: int
    rows: float
    row_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What of a model travels between workers that divide it otherwise than by layers, as one forward pass has shown.

    Attributes:
        rest_bytes: of the parameters that belong to no block: sharded workers gather them once in a step.
        attended_bytes: of keys and values of all attention, of one example.
        experts: of each layer that has some.
        routed_bytes: of the outputs that a router's loss is made of, of one example.
    """

    rest_bytes: int = 0
    attended_bytes: float = 0.0
    experts: tuple[ExpertTraffic, ...] = ()
    routed_bytes: float = 0.0


@dataclass(frozen=True)
class SlicedProfile:
    """What tensor parallelism makes of a model on so many devices, as its layout was tried.

    Attributes:
        held: the part of the trained parameters' bytes that each device has; what cannot be divided is whole on all.
        computed: the part of a step's operations that each device does.
        summed_bytes: of the tensors that all devices sum in a step, of one example.
    """

    devices: int
    held: float
    computed: float
    summed_bytes: float


@dataclass(frozen=True)
class ComputeProfile:
    """What a training step of a model takes on one device, measured, or as a person has written it.

    Attributes:
        batches: at least one; their sizes ascend.
        optimizer_s: for one update of all parameters.
        fixed_s: of a step, whatever the batch: launches, bookkeeping.
        spread: standard deviation of a step's time, over its mean; None where it is not known.
        varied: whether examples differ in length, so that batches of as many do not take the same time.
        device: that it was measured on, as text.
        accumulate_s: for adding the gradients of all parameters to those of an earlier micro-batch.
        crowd, crowding: so many workers of the host that train side by side, and share its caches and its memory, each
            take so many times as long as one alone.
    """

    batches: tuple[BatchProfile, ...]
    optimizer_s: float = 0.0
    fixed_s: float = 0.0
    spread: float | None = None
    device: str = ""
    threads: int = 0
    crowd: int = 1
    crowding: float = 1.0
    accumulate_s: float = 0.0
    varied: bool = False

    def __post_init__(self) -> None:
        _check_figures(self, "the profile")
        sizes = [batch.examples for batch in self.batches]
        if not sizes or sizes != sorted(set(sizes)):
            raise UsageError(f"a profile needs batches of ascending sizes, got {sizes}")

    def at(self, examples: int) -> BatchProfile:
        """Returns what a batch of another size takes: on the line through the two measured ones next to it.

        A profile of one batch is in proportion to the examples; so are batches below the smallest, where the line would
        go below.
        """
        if examples not in self._known:
            self._known[examples] = self._between(examples)
        return self._known[examples]

    @cached_property
    def _known(self) -> dict[int, BatchProfile]:
        """Batches by size: those that were measured, and those that were asked for, which a search does often."""
        return {batch.examples: batch for batch in self.batches}

    def _between(self, examples: int) -> BatchProfile:
        low, high = self._next_to(examples)
        scale = examples / low.examples if low is high else (examples - low.examples) / (high.examples - low.examples)

        def between(one: float, other: float) -> float:
            if low is high:
                return one * scale
            return max(one + (other - one) * scale, one * min(1.0, examples / low.examples))

        layers = tuple(
            replace(
                one,
                forward_s=between(one.forward_s, other.forward_s),
                backward_s=between(one.backward_s, other.backward_s),
                saved_bytes=round(between(one.saved_bytes, other.saved_bytes)),
                crossing_bytes=round(between(one.crossing_bytes, other.crossing_bytes)),
            )
            for one, other in zip(low.layers, high.layers, strict=False)
        )
        return BatchProfile(
            examples,
            between(low.forward_s, high.forward_s),
            between(low.backward_s, high.backward_s),
            round(between(low.saved_bytes, high.saved_bytes)),
            layers,
            round(between(low.workspace_bytes, high.workspace_bytes)),
        )

    def among(self, workers: int) -> float:
        """Returns how many times as long each of so many workers of one host takes as one alone."""
        if self.crowd < 2:
            return 1.0
        return 1 + (self.crowding - 1) * (min(workers, self.crowd) - 1) / (self.crowd - 1)

    def _next_to(self, examples: int) -> tuple[BatchProfile, BatchProfile]:
        if len(self.batches) == 1:
            return self.batches[0], self.batches[0]
        above = bisect_right(self.batches, examples, key=lambda batch: batch.examples)
        place = min(max(above, 1), len(self.batches) - 1)
        return self.batches[place - 1], self.batches[place]


def _check_figures(value: BatchProfile | ComputeProfile | LayerSpec, where: str) -> None:
    for field in fields(value):
        figure = getattr(value, field.name)
        if isinstance(figure, int | float) and not (math.isfinite(figure) and figure >= 0):
            raise UsageError(f"{field.name} of {where} must be a number of at least 0, got {figure!r}")


@dataclass(frozen=True)
class ExpertSpec:
    """Of how many experts a parameter is, and which of them it belongs to; -1 where it has a row of each."""

    count: int
    index: int = -1


@dataclass(frozen=True)
class TokenUse:
    """What a model's forward does with the tokens of a sequence.

    Attributes:
        counts: where it calls `torch.arange` for their places.
        others: where it calls that for other numbers.
        dims: of each tensor of its output, in which its tokens are.
        evaluated: those in eval mode; None where it cannot be divided there.
    """

    counts: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    evaluated: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StepsToGoal:
    """How many steps a job has taken to a goal, and from where on larger batches stop to pay.

    Attributes:
        goal: as text, "accuracy 0.9".
        global_batch_size: with which it was reached.
        critical_batch: in examples: the noise of the gradients in the mean over the steps.
        noise: the noise scale in examples, by equal parts of the run; `inf` where noise is all that was seen.

    Raises:
        UsageError: a number is too small.

    Examples:
        >>> hr.StepsToGoal("accuracy 0.9", 64, 6000, 1000.0).steps
        6000
    """

    goal: str
    global_batch_size: int
    steps: int
    critical_batch: float
    noise: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("global_batch_size", 1), ("steps", 1), ("critical_batch", 0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise UsageError(
                    f"{name} of the goal {self.goal!r} must be a number of at least {least}, got {value!r}"
                )
