"""A pipeline's rank without the others: what each layer costs, and what the others would send, without values."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headrace.batches import select_target
from headrace.channels.mailbox import Inbox, Outbox
from headrace.metrics import weigh
from headrace.pipeline.channels import Channel, Channels, Edge, Form, Track, pack, tensors_of, values_of
from headrace.pipeline.profile import Sweep, groups_of
from headrace.pipeline.schedules.schedule import PassKind, PipelineSchedule
from headrace.pipeline.stage import OUTPUT, cut
from headrace.pipeline.trace.tracing import trace
from headrace.spec.compute import LayerSpec
from headrace.spec.plan import Plan
from headrace.training.user_code.objective import Objective
from headrace.trees import nbytes
from headrace.trees import tensors_of as tensors_in

_PER_S = 1e10
"""Operations a second: a partition by time asks how layers compare, not how long they take."""

Messages = Mapping[tuple[int, int], Form]
"""What each stage sends to each that needs it, of one micro-batch."""


def layers_of(module: nn.Module, objective: Objective, batch: Any, sample: Any) -> tuple[LayerSpec, ...]:
    """Returns a model's layers with the bytes that they keep; their times are by the operations of their products."""
    traced = trace(module, sample, objective.inputs)
    groups = groups_of(traced)

    def loss(output: Any) -> Tensor:
        return weigh(objective.loss(output, select_target(batch, objective.target)), 1, "the loss")[0]

    sweep = Sweep(module, cut(traced, groups), traced.inputs(batch), loss, torch.device("cpu"))
    saved, crossing = sweep.count()
    rows = zip(_seconds(sweep), saved, crossing, strict=True)
    known = {group[-1]: row for group, row in zip(groups, rows, strict=True)}
    size = {name: nbytes(each) for name, each in module.named_parameters()}
    layers = []
    for layer in traced.layers:
        took, kept, crosses = known.get(layer.name, (0.0, 0, 0))
        own = sum(size[name] for name in layer.parameters)
        costs = took, 2 * took, kept, crosses, bool(layer.joined)
        layers.append(LayerSpec(layer.name, layer.parameters, own, *costs))
    return tuple(layers)


def _seconds(sweep: Sweep) -> list[float]:
    found: list[float] = []
    alive: dict[str, Any] = dict(sweep.inputs)
    for stage in sweep.stages:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            alive |= stage.run(alive)
        found.append(counter.get_total_flops() / _PER_S)
    return found


def messages(module: nn.Module, inputs: Any, batch: Any, sample: Any, plan: Plan) -> Messages:
    """Returns what the stages of a model send each other of a micro-batch; `inputs` is as in `Job`."""
    traced = trace(module, sample, inputs, check=False)
    found: dict[tuple[int, int], Form] = {}
    alive: dict[str, Any] = dict(traced.inputs(batch))
    for stage in cut(traced, plan.partition):
        made = stage.run(alive)
        made.pop(OUTPUT, None)
        for consumer in stage.consumers:
            needed = {value.name: made[value.name] for value in stage.sends if consumer in value.consumers}
            found[stage.index, consumer] = json.loads(pack(needed, lambda tensor: tensor.requires_grad)[0])
        alive |= {name: _received(each) for name, each in made.items()}
    return found


def _received(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


class OneRanksChannels(Channels):
    """The channels of one rank alone: what would come is there, and what it sends goes nowhere.

    `sent` has what stages send of a micro-batch, by its examples; `shared` returns memory that two processes see.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        schedule: PipelineSchedule,
        rank: int,
        module: nn.Module,
        sent: Mapping[int, Messages],
        shared: Callable[[int], Tensor],
    ) -> None:
        self.device = torch.device("cpu")
        self._actions = tuple(schedule.actions(rank))
        self._module = module
        self._sent = sent
        self._shared = shared
        self._sizes: dict[int, int] = {}
        self._channels = {
            (edge.source, edge.target, edge.kind): self._make(edge, None, None) for edge in edges if rank in edge.ranks
        }

    def begin(self, inputs: Mapping[int, Mapping[str, Tensor]], evaluates: bool = False, trains: bool = True) -> None:
        self._sizes = {index: len(tensors_in(own)[0]) for index, own in inputs.items()}
        for channel in self._channels.values():
            assert isinstance(channel, _OneEnd)
            channel.begin(self._coming(channel.edge))

    def meet(self) -> None:
        """Does nothing: all has come."""

    def finish(self) -> None:
        """Does nothing: nothing is on its way."""

    def close(self) -> None:
        """Holds no connections."""

    def _coming(self, edge: Edge) -> Iterable[Form]:
        """Returns the messages of a batch, in the order in which this rank takes them."""
        if edge.kind == "tied":
            return ()
        back = edge.kind == "gradients"
        route = (edge.target, edge.source) if back else (edge.source, edge.target)
        kinds = (PassKind.BACKWARD, PassKind.BACKWARD_INPUT) if back else (PassKind.FORWARD,)
        taken = (each for each in self._actions if each.stage == edge.target and each.kind in kinds)
        forms = (self._sent[self._sizes[each.micro_batch]][route] for each in taken if each.micro_batch in self._sizes)
        return [_of_gradients(form) for form in forms] if back else list(forms)

    def _make(self, edge: Edge, sender: Outbox | None, receiver: Inbox | None) -> Channel:
        return _OneEnd(edge, self._module, self._shared)


class _OneEnd(Channel):
    """One edge of a rank that is alone; its memory is that of the mailbox."""

    def __init__(self, edge: Edge, module: nn.Module, shared: Callable[[int], Tensor]) -> None:
        self.edge = edge
        self._module = module
        self._shared = shared
        self._slots: list[Tensor] = []
        self._turn = 0
        self._waiting: deque[Form] = deque()

    def begin(self, coming: Iterable[Form]) -> None:
        """Takes what a batch will bring."""
        self._waiting = deque(coming)

    def send(
        self, values: Mapping[str, Any], tracked: Callable[[Tensor], bool] = lambda _: False, about: Hashable = None
    ) -> None:
        self._pass(sum(each.nbytes for each in values.values() if isinstance(each, Tensor)))

    def receive(self, track: Track = lambda tensor, _: tensor, about: Hashable = None) -> dict[str, Any]:
        if self.edge.kind == "tied":
            name = str(about).removeprefix("the gradient of ")
            made = torch.empty_like(self._module.get_parameter(name))
            self._pass(made.nbytes)
            return {name: made}
        form = self._waiting.popleft()
        tensors = tensors_of(form, torch.device("cpu"))
        self._pass(sum(each.nbytes for each in tensors))
        return values_of(form, tensors, track)

    def moved_bytes(self) -> int:
        return 0

    def _pass(self, size: int) -> None:
        """Takes memory for a message in one slot after the other."""
        if self.edge.ranks[0] == self.edge.ranks[1] or not size:
            return
        if len(self._slots) <= self._turn:
            self._slots.append(self._shared(size))
        elif self._slots[self._turn].nbytes < size:
            self._slots[self._turn] = self._shared(size)
        self._turn = (self._turn + 1) % self.edge.slots


def _of_gradients(form: Form) -> Form:
    """Returns what goes back for a message."""
    back = {name: each for name, each in form.items() if isinstance(each, list) and len(each) == 3 and each[2]}
    return {name: [word, shape, False] for name, (word, shape, _) in back.items()}
