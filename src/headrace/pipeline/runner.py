"""One rank's part of a pipeline: its stages, micro-batch after micro-batch, in the order of a schedule.

    forward          receive values ─► run the stage ─► send values             save the graph, or the inputs alone
    backward         (run it again) ─► receive gradients ─► differentiate ─► send gradients
    weight pass      make the weights' gradients that a split backward pass has left

Gradients add up in `.grad`, in the order of the backward passes, which is the same for any number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UnfitMachine
from headrace.machine.generators import random_states, set_random_states
from headrace.machine.limits import out_of_memory
from headrace.machine.resources import resident_bytes
from headrace.pipeline.backward import WeightGradient, run_backward
from headrace.pipeline.buffers import HeldState, RunningStatistics
from headrace.pipeline.channels import Channels
from headrace.pipeline.schedules.schedule import Action, PassKind
from headrace.pipeline.stage import OUTPUT, Stage
from headrace.spec.events import StagePass

RECOMPUTE = ("never", "except_last", "always")
"""Which forward passes are run again for their backward: none, all but those whose backward follows at once, all."""

_LESS = "use more micro-batches or stages, schedule='1f1b', or recompute='always'"
_FEWER = "use a smaller global_batch_size, which an evaluation takes whole, or more stages"
_PARTS = {PassKind.BACKWARD_INPUT: "input", PassKind.BACKWARD_WEIGHT: "weights"}


_RandomStates = tuple[Tensor, Mapping[str, Tensor]]
"""Of torch's generators: the CPU's, and those of accelerators."""


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one micro-batch, and what makes a scalar loss of the model's output, where the last stage is."""

    inputs: Mapping[str, Tensor]
    finish: Callable[[Any], Tensor]


@dataclass
class _Saved:
    """What a stage saves of a micro-batch from its forward to its backward.

    Attributes:
        values: what it received, by name; those that need a gradient are leaves.
        outputs: what it sent, and its loss; nothing where forward is to be run again.
        rng_state: of the generators before the forward that is to be run again.
    """

    values: dict[str, Any]
    received: dict[int, list[str]]
    outputs: dict[str, Any] = field(default_factory=dict)
    rng_state: _RandomStates | None = None
    buffers: Sequence[HeldState] = ()


class Runner:
    """Runs a rank's stages on one batch after the other.

    Args:
        actions: what this rank does with a batch; micro-batches that are empty are left out.
        recompute: see `RECOMPUTE`.
        half: the type that forward computes in where it can (autocast); None for the tensors' own.

    Attributes:
        in_flight: most forward passes so far that waited for their backward at a time.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        channels: Channels,
        actions: Iterable[Action],
        recompute: str,
        statistics: RunningStatistics,
        trains: Container[int],
        half: torch.dtype | None = None,
    ) -> None:
        self._stages = stages
        self._channels = channels
        self._actions = tuple(actions)
        self._recompute = recompute
        self._statistics = statistics
        self.half = half
        self._trains = trains
        self._buffers = {index: stage.changing_buffers() for index, stage in stages.items()}
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._weights: dict[tuple[int, int], list[WeightGradient]] = {}
        self._waited = 0.0
        self._count = 0
        self.last = any(stage.last for stage in stages.values())
        self.in_flight = 0
        self.passes: list[StagePass] = []
        for action in self._actions:
            stages[action.stage].gradients.split |= action.kind is PassKind.BACKWARD_INPUT

    def run(self, micro_batches: Sequence[MicroBatch | None]) -> None:
        """Runs forward and backward of this rank's stages; gradients add up in `.grad`. None stands for no examples."""
        self.passes = []
        present = {index: each for index, each in enumerate(micro_batches) if each is not None}
        self._count = len(present)
        actions = [action for action in self._actions if action.micro_batch in present]
        self._channels.begin({index: each.inputs for index, each in present.items()})
        try:
            for action, after in zip(actions, [*actions[1:], None], strict=True):
                self._channels.meet()
                began, self._waited = monotonic(), 0.0
                what = f"{action.kind} of micro-batch {action.micro_batch}"
                with self._explaining(action.stage, what, _LESS):
                    self._do(action, after, present[action.micro_batch])
                place, part = (action.stage, action.micro_batch, action.backward), _PARTS.get(action.kind, "")
                self.passes.append(StagePass(*place, began, monotonic(), self._waited, part))
            self._channels.finish()
        finally:
            self._saved.clear()
            self._weights.clear()
            for buffers in self._buffers.values():
                buffers.settle()
        self._statistics.commit()

    @torch.no_grad()
    def predict(self, inputs: Mapping[str, Tensor], training: bool = False) -> Any:
        """Returns the model's output on the rank of the last stage, None elsewhere; every rank calls it."""
        output = None
        self._channels.begin({0: inputs}, evaluates=True, trains=training)
        for _, stage in sorted(self._stages.items()):
            self._channels.meet()
            stage = stage if training else stage.evaluated
            with self._explaining(stage.index, "forward of an evaluation", _FEWER), self._autocast():
                values, _ = self._receive_values(stage, inputs)
                outputs = stage.run(values)
            self._send(stage, outputs)
            output = outputs.get(OUTPUT)
        self._channels.finish()
        return output

    def _do(self, action: Action, after: Action | None, micro_batch: MicroBatch) -> None:
        key = action.stage, action.micro_batch
        if action.kind is PassKind.FORWARD:
            backward_next = after is not None and (after.stage, after.micro_batch) == key
            again = self._recompute == "always" or (self._recompute == "except_last" and not backward_next)
            self._forward(key, micro_batch, again)
        elif action.kind is PassKind.BACKWARD_WEIGHT:
            for gradient in self._weights.pop(key):
                gradient.add()
        else:
            self._backward(key, micro_batch, split=action.kind is PassKind.BACKWARD_INPUT)

    def _forward(self, key: tuple[int, int], micro_batch: MicroBatch, again: bool) -> None:
        stage = self._stages[key[0]]
        values, received = self._receive_values(stage, micro_batch.inputs)
        saved = _Saved(values, received, rng_state=_rng_state() if again else None)
        if again:
            with torch.no_grad(), self._buffers[stage.index].watched() as saved.buffers:
                outputs = self._run_stage(key, micro_batch, saved, first=True)
        else:
            with self._buffers[stage.index].left_to_backward():
                outputs = self._run_stage(key, micro_batch, saved, first=True)
        differentiable = stage.index in self._trains or any(_needs_gradient(value) for value in values.values())

        def is_tracked(tensor: Tensor) -> bool:
            # A forward without a graph does not say; a receiver that gets no gradient of a value sends None.
            continuous = tensor.is_floating_point() or tensor.is_complex()
            return tensor.requires_grad or (again and differentiable and continuous)

        self._send(stage, outputs, is_tracked)
        if not again:
            saved.outputs = outputs
        self._saved[key] = saved
        self.in_flight = max(self.in_flight, len(self._saved))

    def _backward(self, key: tuple[int, int], micro_batch: MicroBatch, split: bool) -> None:
        stage, saved = self._stages[key[0]], self._saved[key]
        if saved.rng_state:
            with _drawing_from(saved.rng_state), self._buffers[stage.index].as_before(saved.buffers):
                saved.outputs = self._run_stage(key, micro_batch, saved, first=False)
        roots: list[tuple[Tensor, Tensor | None]] = []
        if OUTPUT in saved.outputs:
            roots.append((saved.outputs[OUTPUT], None))
        for consumer in stage.consumers:
            for name, gradient in self._receive(consumer, stage.index, "gradients").items():
                if gradient is not None:
                    roots.append((saved.outputs[name], gradient))
        saved.outputs = {}
        roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        later: list[WeightGradient] = []
        if roots:
            with stage.gradients.deferring() if split else stage.gradients.adding() as deferred:
                run_backward([root for root, _ in roots], [gradient for _, gradient in roots])
            later = deferred or []
        del roots
        for producer, names in saved.received.items():
            back = {name: saved.values[name].grad for name in names if _needs_gradient(saved.values[name])}
            self._channels.channel(stage.index, producer, "gradients").send(back)
        del self._saved[key]
        if split:
            self._weights[key] = later

    def _run_stage(self, key: tuple[int, int], micro_batch: MicroBatch, saved: _Saved, first: bool) -> dict[str, Any]:
        """Runs a stage; where it is the last, the loss stands for the model's output."""
        with self._statistics.following(again=not first), self._autocast():
            outputs = self._stages[key[0]].run(saved.values)
            if OUTPUT in outputs:
                outputs[OUTPUT] = micro_batch.finish(outputs[OUTPUT])
        return outputs

    def _explaining(self, stage: int, what: str, remedy: str) -> AbstractContextManager[None]:
        def held() -> str:
            waiting = f"{len(self._saved)} of {self._count} micro-batches were in flight"
            return f"of which {self._stages[stage].parameter_bytes():,} are the stage's parameters, and {waiting}"

        return explain_out_of_memory(f"stage {stage} ran out of memory in the {what}", held, remedy)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half is None else torch.autocast(self._channels.device.type, self.half)

    def _receive_values(
        self, stage: Stage, inputs: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[int, list[str]]]:
        """Returns what a stage needs, and the names of what each producer has sent."""
        values: dict[str, Any] = {name: inputs[name] for name in stage.inputs}
        names = {}
        for producer in stage.producers:
            received = self._receive(producer, stage.index, "values")
            names[producer] = list(received)
            values |= received
        return values, names

    def _receive(self, source: int, target: int, kind: str) -> dict[str, Any]:
        began = monotonic()
        received = self._channels.channel(source, target, kind).receive(
            lambda tensor, tracked: tensor.requires_grad_() if tracked else tensor
        )
        self._waited += monotonic() - began
        return received

    def _send(
        self, stage: Stage, outputs: Mapping[str, Any], tracked: Callable[[Tensor], bool] = lambda tensor: False
    ) -> None:
        for consumer in stage.consumers:
            needed = {value.name: outputs[value.name] for value in stage.sends if consumer in value.consumers}
            self._channels.channel(stage.index, consumer, "values").send(needed, tracked)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _rng_state() -> _RandomStates:
    return torch.get_rng_state(), random_states()


@contextmanager
def _drawing_from(state: _RandomStates) -> Iterator[None]:
    """Lets the generators draw from an earlier state, and go on from the present one afterwards."""
    now = _rng_state()
    _set_rng_state(state)
    try:
        yield
    finally:
        _set_rng_state(now)


def _set_rng_state(states: _RandomStates) -> None:
    torch.set_rng_state(states[0])
    set_random_states(states[1])


@contextmanager
def explain_out_of_memory(where: str, held: Callable[[], str], remedy: str) -> Iterator[None]:
    """Raises an `UnfitMachine` that explains where and with what the process ran out of memory; `held` only then."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        resident = resident_bytes()
        raise UnfitMachine(
            f"{where}, when the process held {resident:,} bytes, {held()}: {str(error) or 'no more memory'}; {remedy}"
        ) from error
