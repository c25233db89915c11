"""Compute and exchange of one rank of a pipeline, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.batches import select_target
from headrace.collectives.base import ProcessGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.hooks import called, hooked_parameters, silenced
from headrace.metrics import Mean, weigh
from headrace.modules import frozen_until
from headrace.pipeline.channels import Channels
from headrace.pipeline.runner import MicroBatch, Runner, explain_out_of_memory
from headrace.pipeline.stage import TracedModel
from headrace.pipeline.stage_module import StageModule
from headrace.policies.roles import bounds
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.training.clipping import GradientClipper, LossScale, StepDecision
from headrace.training.compute import Compute, Computed
from headrace.training.exchange import UpdatingExchange
from headrace.training.gradients import GradientSink, assign, divide
from headrace.training.on_device.totals import Total, all_weight, mean_of, own_weight
from headrace.training.optimizer import StatePiece
from headrace.training.update import Updater
from headrace.training.user_code.differentiable import require_graph
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trained import TrainedParameters
from headrace.training.whole_model import ModelParallelGroup, cut
from headrace.trees import widened

_FEWER_COPIES = "use more stages, or an optimizer that keeps less: SGD nothing, momentum one copy, Adam two"


class StagedModel(Compute):
    """The compute of one rank of a pipeline.

    Gradients are those of the share's part of the global batch's mean loss, as those of `WholeModel`, on the rank that
    holds the parameter; of a parameter that several ranks hold, each has the whole gradient.

    `tied` are the names of those of them that other ranks hold, too. `sink` takes the gradients of this rank's
    parameters; None leaves them in `.grad`. `scale` is that of the loss, None for none.
    """

    def __init__(
        self,
        traced: TracedModel,
        part: StageModule,
        runner: Runner,
        channels: Channels,
        objective: Objective,
        micro_batches: int,
        total: Total,
        scale: LossScale | None = None,
    ) -> None:
        self.module, self.device = part.module, channels.device
        self.runner = runner
        self.counts = runner.last
        self._traced = traced
        self._part = part
        self._channels = channels
        self._objective = objective
        self._micro_batches = micro_batches
        self._total = total
        self.sink: GradientSink | None = None
        self.scale = scale
        self.parameters, self.tied = frozenset(part.parameters()), part.tied()
        self.mates = ThreadCollective(ThreadGroup(1), 0)
        self.trained = {name: each for name, each in part.parameters().items() if each.requires_grad}
        self._trained = list(self.trained.values())
        self._flags = TrainedParameters(part.module)
        until = frozen_until(part.module)
        self._until = {name: until[name] for name in self.trained if name in until}

    def run(self, share: Share) -> Computed:
        if share.examples == 0:
            if self._objective.weighed:
                self._total([0.0])
            if self.sink is not None:
                self.sink.store_nothing()
            return Computed(None, 0.0)
        self._flags.require_frozen()
        batch = self.place(share.batch)
        held = [parameter.grad for parameter in self._trained]
        if self.sink is not None:
            assign(self._trained, [None] * len(held))
        losses: dict[int, tuple[Tensor, float | Tensor]] = {}
        micro_batches: list[MicroBatch | None] = []
        for index, (start, stop) in enumerate(bounds(share.examples, (1,) * self._micro_batches)):
            if start == stop:
                micro_batches.append(None)
                continue
            piece = cut(batch, start, stop, share.examples, "micro_batches")
            finish = partial(self._finish, piece, stop - start, share, losses, index)
            micro_batches.append(MicroBatch(self._traced.inputs(piece), finish))
        hooked = bool(hooked_parameters(self.trained))
        # Hooks see what they would on one device, the whole gradient.
        with silenced(self._trained) if hooked else nullcontext():
            self.runner.run(micro_batches)
        self.in_flight, self.passes = self.runner.in_flight, self.runner.passes
        self.moved_bytes = self._channels.moved_bytes()
        self._part.sum_tied(self._channels)
        own = own_weight(self._total, [weight for _, weight in losses.values()])
        for name, epoch in self._until.items():
            if share.epoch < epoch:
                self.trained[name].grad = None
        # Every rank knows the weight of a loss that is a mean.
        weight: float | Tensor = float(share.examples)
        gradients = [parameter.grad for parameter in self._trained]
        if self._objective.weighed:
            weight = all_weight(self._total, own)
            divide(gradients, weight)
        if hooked:
            called(self._trained, share.examples / share.of)
            gradients = [parameter.grad for parameter in self._trained]
        if self.sink is not None:
            self.sink.store(gradients)
            assign(self._trained, held)
        totals = [total for total, _ in losses.values()]
        return Computed(mean_of(totals, own), own if self.counts else weight)

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        """Returns the model's output for a batch on the rank that has the last stage, None elsewhere.

        All ranks of the replica call it.
        """
        training = self.module.training
        traced = self._traced if training else self._traced.evaluated or self._traced
        output = self.runner.predict(traced.inputs(self.place(batch)), training)
        return widened(output, self.runner.half)

    def spread_tied(self) -> None:
        """Copies the first holder's values of each tied parameter to the others; all ranks of the replica call it."""
        self._part.spread_tied(self._channels)

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().whole_tensors(leads):
            if name.partition("/")[2] in self._part.saved:
                yield name, tensor

    def has_state_of(self, module: str) -> bool:
        return module in self._part.stateful

    def _finish(
        self,
        piece: Any,
        examples: int,
        share: Share,
        losses: dict[int, tuple[Tensor, float | Tensor]],
        index: int,
        output: Any,
    ) -> Tensor:
        """Returns what is differentiated of a micro-batch's loss, and notes its loss."""
        loss = self._objective.loss(output, select_target(piece, self._objective.target))
        total, weight = weigh(loss, examples)
        # Not where a forward is repeated before its backward: the first has no graph.
        if torch.is_grad_enabled():
            require_graph(total)
        losses[index] = total.detach(), weight
        # What a part of a `Mean` is all_weight is known when all have been weighed.
        part = total if isinstance(loss, Mean) else total / share.of
        return part if self.scale is None else part * self.scale.value


class StagedReplica(ModelParallelGroup):
    """One rank's stages of a replica that is a pipeline; `model` is the whole model."""

    piecewise = True

    def __init__(self, compute: StagedModel, group: ProcessGroup, everyone: ProcessGroup, model: ModelSpec) -> None:
        self.group = group
        self.everyone = everyone
        self.repeated = frozenset()
        held = tuple(spec for spec in model.parameters if spec.name in compute.parameters)
        self.model = replace(model, parameters=held)
        self._compute = compute

    def compute(self, whole: Callable[[], Compute], sink: GradientSink | None, scale: LossScale | None) -> Compute:
        self._compute.sink, self._compute.scale = sink, scale
        return self._compute

    def spread(self) -> None:
        self._compute.spread_tied()


class SlicedStages(ModelParallelGroup):
    """One rank's slices of its stages, of a replica that is `group`."""

    piecewise = True

    def __init__(self, stages: StagedReplica, slices: ModelParallelGroup, group: ProcessGroup) -> None:
        self.group, self.everyone = group, stages.everyone
        self.model, self.slices = stages.model, slices.slices
        held = {each.name for each in stages.model.parameters}
        self.repeated, self.times = slices.repeated & held, slices.times
        self.stages = stages.group.world
        self._stages, self._slices = stages, slices

    def compute(self, whole: Callable[[], Compute], sink: GradientSink | None, scale: LossScale | None) -> Compute:
        return self._slices.compute(lambda: self._stages.compute(whole, sink, scale), None, None)

    def spread(self) -> None:
        self._stages.spread()


class PipelineExchange(UpdatingExchange):
    """Updates the parameters that this rank holds; there is nothing to exchange but the norm of all gradients."""

    def __init__(self, plan: Plan, rank: int, compute: StagedModel, clipper: GradientClipper, updater: Updater) -> None:
        self._rank = rank
        self._part = plan.part_of(rank)
        self._owners = {segment.parameter: segment.owner for segment in plan.segments}
        self._trained = compute.trained
        self._clipper = clipper
        self.updater = updater
        self.defers = clipper.defers
        here = [parameter for parameter in compute.module.parameters() if not parameter.is_meta]
        self.parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in here)

    def update(self, round_: int) -> None:
        # The optimizer makes what it keeps in its first step.
        with explain_out_of_memory(
            f"{self._part} ran out of memory in the step of the optimizer", self._holds, _FEWER_COPIES
        ):
            super().update(round_)

    def _holds(self) -> str:
        """Returns what the parameters and the optimizer take."""
        name = type(self.updater.optimizer).__name__
        state = self.updater.state_bytes()
        return f"of which {self.parameter_bytes:,} are its parameters and {state:,} what {name} keeps of them"

    def begin(self, round_: int) -> None:
        self.updater.optimizer.zero_grad()

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        held = {name: each.grad for name, each in self._trained.items() if each.grad is not None}
        # What several ranks hold is measured by the first of them.
        measured = [gradient for name, gradient in held.items() if self._owners[name] == self._rank]
        return self._clipper.clip(measured, list(held.values()), finite)

    def state(self) -> tuple[StatePiece, ...]:
        return tuple(piece for piece in super().state() if self._owners[piece.parameter] == self._rank)
