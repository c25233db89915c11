"""One rank's part of a pipeline: its stages, micro-batch after micro-batch, in the order of a schedule.

    forward    receive values ─► run the stage ─► send values               keep the graph, or the inputs alone
    backward   (run it again) ─► receive gradients ─► differentiate ─► send gradients

Gradients add up in `.grad`, in the order of the backward passes, which is the same for any number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from headrace.pipeline.buffers import RunningStatistics, SavedBuffer
from headrace.pipeline.channels import Channels
from headrace.pipeline.memory import SavedBytes, explain_out_of_memory
from headrace.pipeline.schedules import Action
from headrace.pipeline.stage import OUTPUT, Stage
from headrace.spec.events import StagePass

RECOMPUTE = ("never", "except_last", "always")
"""Which forward passes are run again for their backward: none, all but those whose backward follows at once, all."""

_LESS = "use more micro-batches or stages, schedule='1f1b', or recompute='always'"
_FEWER = "use a smaller global_batch_size, which an evaluation takes whole, or more stages"


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Attributes:
        inputs: the model's, by name.
        finish: from the model's output to the loss that is differentiated, a scalar; run where the last stage is.
    """

    inputs: Mapping[str, Tensor]
    finish: Callable[[Any], Tensor]


@dataclass
class _Held:
    """What a stage keeps of a micro-batch from its forward to its backward.

    Attributes:
        values: what it got, by name; those that are tracked are leaves.
        arrived: names of the values of each producer.
        made: what it sent, and its loss; nothing where forward is to be run again.
        dice: the generators' states at the forward that is to be run again.
        moved: buffers as they were then.
    """

    values: dict[str, Any]
    arrived: dict[int, list[str]]
    made: dict[str, Any] = field(default_factory=dict)
    dice: tuple[Tensor, ...] = ()
    moved: Sequence[SavedBuffer] = ()


class Runner:
    """Runs a rank's stages on one batch after the other.

    Args:
        stages: of this rank, by index.
        roads: between stages.
        actions: what this rank does with a batch; micro-batches that are empty are left out.
        recompute: see `RECOMPUTE`.
        statistics: of the BatchNorm layers of these stages.
        trains: the stages that have a parameter to train.
        half: the type that forward computes in where it can (autocast); None for the tensors' own.

    Attributes:
        last: whether the model's output is here.
        in_flight: most forward passes so far that waited for their backward at a time.
        saved: bytes that autograd has kept, where they are counted; None where they are not.
        passes: of the last batch.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        roads: Channels,
        actions: Sequence[Action],
        recompute: str,
        statistics: RunningStatistics,
        trains: Container[int],
        half: torch.dtype | None = None,
    ) -> None:
        self._stages = stages
        self._roads = roads
        self._actions = tuple(actions)
        self._recompute = recompute
        self._statistics = statistics
        self.half = half
        self._trains = trains
        self._buffers = {index: stage.moving for index, stage in stages.items()}
        self._held: dict[Action, _Held] = {}
        self._waited = 0.0
        self._count = 0
        self.last = any(stage.last for stage in stages.values())
        self.in_flight = 0
        self.saved: SavedBytes | None = None
        self.passes: list[StagePass] = []

    def run(self, pieces: Sequence[MicroBatch | None]) -> None:
        """Runs forward and backward of this rank's stages; gradients add up in `.grad`.

        Args:
            pieces: the micro-batches; None for one without examples.

        Raises:
            UnfitMachine: there is not enough memory.
        """
        self.passes = []
        there = [piece is not None for piece in pieces]
        self._count = sum(there)
        actions = [action for action in self._actions if action.micro_batch < len(there) and there[action.micro_batch]]
        following = [*actions[1:], None]
        try:
            for action, after in zip(actions, following, strict=True):
                piece = pieces[action.micro_batch]
                assert piece is not None
                began, self._waited = monotonic(), 0.0
                way = "backward" if action.backward else "forward"
                with self._room(action.stage, f"{way} of micro-batch {action.micro_batch}", _LESS):
                    if action.backward:
                        self._backward(action, piece)
                    else:
                        at_once = after == Action(action.stage, action.micro_batch, backward=True)
                        again = self._recompute == "always" or (self._recompute == "except_last" and not at_once)
                        self._forward(action, piece, again)
                done = StagePass(action.stage, action.micro_batch, action.backward, began, monotonic(), self._waited)
                self.passes.append(done)
        finally:
            self._held.clear()
        self._statistics.commit()

    @torch.no_grad()
    def predict(self, inputs: Mapping[str, Tensor], training: bool = False) -> Any:
        """Returns the model's output where the last stage is, None elsewhere; every rank calls it.

        Args:
            inputs: the model's, by name.
            training: whether the model is in training, in which it may do something else.

        Raises:
            UnfitMachine: there is not enough memory.
        """
        output = None
        for _, stage in sorted(self._stages.items()):
            stage = stage if training else stage.evaluated
            with self._room(stage.index, "forward of an evaluation", _FEWER), self._autocast():
                values, _ = self._arrive(stage, inputs)
                made = stage.run(values)
            self._send(stage, made, _never)
            output = made.get(OUTPUT)
        return output

    def _forward(self, action: Action, piece: MicroBatch, again: bool) -> None:
        stage = action.stage
        values, arrived = self._arrive(self._stages[stage], piece.inputs)
        held = _Held(values, arrived, dice=_dice() if again else ())
        if again:
            with torch.no_grad(), self._buffers[stage].watched() as held.moved:
                made = self._made(action, piece, held, first=True)
        else:
            made = self._made(action, piece, held, first=True)
        tracked = stage in self._trains or any(_tracked(value) for value in values.values())

        def is_tracked(tensor: Tensor) -> bool:
            # Of a forward without a graph nobody knows yet; who is asked for no gradient leaves it.
            return tensor.requires_grad or (again and tracked and tensor.is_floating_point())

        self._send(self._stages[stage], made, is_tracked)
        if not again:
            held.made = made
        self._held[action] = held
        self.in_flight = max(self.in_flight, len(self._held))

    def _backward(self, action: Action, piece: MicroBatch) -> None:
        stage = action.stage
        forward = Action(stage, action.micro_batch)
        held = self._held[forward]
        if held.dice:
            with _thrown(held.dice), self._buffers[stage].as_before(held.moved):
                held.made = self._made(forward, piece, held, first=False)
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if OUTPUT in held.made:
            roots.append(held.made[OUTPUT])
            gradients.append(None)
        for consumer in self._stages[stage].consumers:
            for name, gradient in self._receive(consumer, stage, "gradients").items():
                if gradient is not None and held.made[name].requires_grad:
                    roots.append(held.made[name])
                    gradients.append(gradient)
        held.made = {}
        wanted = [root.requires_grad for root in roots]
        if any(wanted):
            with self._stages[stage].accumulation.going_on():
                torch.autograd.backward(
                    [root for root, wants in zip(roots, wanted, strict=True) if wants],
                    [gradient for gradient, wants in zip(gradients, wanted, strict=True) if wants],
                )
        del roots, gradients
        for producer, names in held.arrived.items():
            back = {name: held.values[name].grad for name in names if _tracked(held.values[name])}
            self._roads.road(stage, producer, "gradients").send(back, _never)
        if self.saved:
            self.saved.forget(forward)
        del self._held[forward]

    def _made(self, action: Action, piece: MicroBatch, held: _Held, first: bool) -> dict[str, Any]:
        """Runs a stage; where it is the last, the loss stands for the model's output."""
        counting = self.saved.counting(action, held.values) if self.saved else nullcontext()
        with counting, self._statistics.following(again=not first), self._autocast():
            made = self._stages[action.stage].run(held.values)
            if OUTPUT in made:
                made[OUTPUT] = piece.finish(made[OUTPUT])
        return made

    def _room(self, stage: int, what: str, remedy: str) -> AbstractContextManager[None]:
        return explain_out_of_memory(
            f"stage {stage} ran out of memory in the {what}", partial(self._holds, stage), remedy
        )

    def _holds(self, stage: int) -> str:
        held = f"{len(self._held)} of {self._count} micro-batches were in flight"
        return f"of which {self._stages[stage].parameter_bytes:,} are the stage's parameters, and {held}"

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half is None else torch.autocast(self._roads.device.type, self.half)

    def _arrive(self, stage: Stage, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[int, list[str]]]:
        """Returns what a stage gets, and the names of what each producer has sent."""
        values: dict[str, Any] = {name: inputs[name] for name in stage.inputs}
        arrived = {}
        for producer in stage.producers:
            received = self._receive(producer, stage.index, "values")
            arrived[producer] = list(received)
            values |= received
        return values, arrived

    def _receive(self, source: int, target: int, kind: str) -> dict[str, Any]:
        began = monotonic()
        received = self._roads.road(source, target, kind).receive(_track)
        self._waited += monotonic() - began
        return received

    def _send(self, stage: Stage, made: Mapping[str, Any], tracked: Callable[[Tensor], bool]) -> None:
        for consumer in stage.consumers:
            needed = [value.name for value in stage.sends if consumer in value.consumers]
            self._roads.road(stage.index, consumer, "values").send({name: made[name] for name in needed}, tracked)


def _track(tensor: Tensor, tracked: bool) -> Tensor:
    return tensor.requires_grad_() if tracked else tensor


def _tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _never(tensor: Tensor) -> bool:
    return False


def _dice() -> tuple[Tensor, ...]:
    """Returns the states of torch's generators."""
    on_device = (torch.cuda.get_rng_state(),) if torch.cuda.is_initialized() else ()
    return (torch.get_rng_state(), *on_device)


@contextmanager
def _thrown(dice: tuple[Tensor, ...]) -> Iterator[None]:
    """Lets the generators draw once more what they have drawn from these states on."""
    now = _dice()
    _set(dice)
    try:
        yield
    finally:
        _set(now)


def _set(dice: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(dice[0])
    for state in dice[1:]:
        torch.cuda.set_rng_state(state)
