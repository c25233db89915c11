"""The part of the model that a rank of a pipeline holds; the tensors of other stages are on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headrace.errors import UsageError
from headrace.modules import replace_tensors, stateful_modules, without_data
from headrace.pipeline.channels import Channels, Edge
from headrace.pipeline.schedules.schedule import PipelineSchedule
from headrace.pipeline.schedules.transfers import queue_lengths
from headrace.pipeline.stage import Stage


class StageModule:
    """The part of a model that one rank holds; `placement` is the rank of each stage.

    `saved` are the names of the parameters and buffers that no rank before this one holds, `stateful` those of the
    modules whose extra state (`get_extra_state`) this rank has.
    """

    def __init__(self, module: nn.Module, stages: Sequence[Stage], placement: Sequence[int], rank: int) -> None:
        self.module = module
        self.stages: Mapping[int, Stage] = {stage.index: stage for stage in stages if placement[stage.index] == rank}
        holders = _holders(stages, placement)
        self._rank = rank
        self._held = {name for name, ranks_ in holders.items() if rank in ranks_}
        self.saved = frozenset(name for name in self._held if holders[name][0] == rank)
        self.stateful = frozenset(name for name, stage in _callers(module, stages) if placement[stage] == rank)
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._tied = {name: holders[name] for name in sorted(self._held & trained) if len(holders[name]) > 1}

    def tied(self) -> list[str]:
        """Returns the names of its parameters that other ranks hold, too."""
        return list(self._tied)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters of this rank, by name."""
        return {name: each for name, each in self.module.named_parameters() if name in self._held}

    def trained_stages(self) -> set[int]:
        """Returns the stages of this rank that have a parameter to train."""
        trained = {name for name, parameter in self.parameters().items() if parameter.requires_grad}
        return {index for index, stage in self.stages.items() if trained.intersection(stage.parameters)}

    def release(self) -> None:
        """Releases what other ranks hold; names, shapes and ties stay as they are."""
        names = (*self.module.named_parameters(), *self.module.named_buffers())
        # TorchScript does not let go of its tensors, which every rank has then, and one of them trains.
        scripted = [module for module in self.module.modules() if isinstance(module, torch.jit.ScriptModule)]
        fixed = {id(each) for module in scripted for each in (*module.parameters(), *module.buffers())}
        left = [(name, tensor) for name, tensor in names if name not in self._held and id(tensor) not in fixed]
        empty = {id(tensor): without_data(tensor) for _, tensor in left}
        for _, tensor in left:
            # Scales of frozen ones, which a module asks for where it writes its state.
            vars(empty[id(tensor)]).update(vars(tensor))
        replace_tensors(self.module, empty)
        if left:
            self.module.register_forward_pre_hook(_refuse)

    def sum_tied(self, channels: Channels) -> None:
        """Gives every holder of a parameter the sum of all holders' gradients: the first adds them up in order."""
        parameters = self.parameters()
        for name, holders in self._tied.items():
            parameter, first, about = parameters[name], holders[0], f"the gradient of {name}"
            if self._rank != first:
                channels.channel(self._rank, first, "tied").send({name: parameter.grad}, about=about)
                parameter.grad = channels.channel(first, self._rank, "tied").receive(about=about)[name]
                continue
            for other in holders[1:]:
                gradient = channels.channel(other, first, "tied").receive(about=about)[name]
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            for other in holders[1:]:
                channels.channel(first, other, "tied").send({name: parameter.grad}, about=about)
        channels.finish()

    def spread_tied(self, channels: Channels) -> None:
        """Gives every holder of a parameter the first one's values."""
        parameters = self.parameters()
        for name, (first, *others) in self._tied.items():
            if self._rank != first:
                value = channels.channel(first, self._rank, "tied").receive(about=name)[name]
                parameters[name].data.copy_(value)
                continue
            for other in others:
                channels.channel(first, other, "tied").send({name: parameters[name].data}, about=name)
        channels.finish()


def edges(stages: Sequence[Stage], schedule: PipelineSchedule) -> list[Edge]:
    """Returns the channels that a pipeline needs, with room for what is on its way in the schedule's order."""
    placement = schedule.placement()
    # Between the same stages more may cross in evaluation.
    pairs = {
        (producer, stage.index) for stage in stages for run in (stage, stage.evaluated) for producer in run.producers
    }
    found, slots = [], queue_lengths(schedule, pairs)
    for producer, consumer in sorted(pairs):
        ranks = placement[producer], placement[consumer]
        found.append(Edge(producer, consumer, "values", ranks, slots.get((producer, consumer), 1)))
        found.append(Edge(consumer, producer, "gradients", ranks[::-1], slots.get((consumer, producer), 1)))
    tied = {(holders[0], other) for holders in _holders(stages, placement).values() for other in holders[1:]}
    for first, other in sorted(tied):
        found += [Edge(other, first, "tied", (other, first)), Edge(first, other, "tied", (first, other))]
    return found


def _holders(stages: Sequence[Stage], placement: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns the ranks that hold each parameter and buffer, ascending."""
    found: dict[str, set[int]] = {}
    for stage in stages:
        for name in (*stage.parameters, *stage.buffers):
            found.setdefault(name, set()).add(placement[stage.index])
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


def _callers(module: nn.Module, stages: Sequence[Stage]) -> Iterator[tuple[str, int]]:
    """Yields the names of the modules with extra state, and the stage that calls each in forward."""
    called = [{id(part) for path in stage.modules for part in module.get_submodule(path).modules()} for stage in stages]
    for name, owner in stateful_modules(module):
        # What lies around the layers runs on every stage, and to its end on the last one.
        yield name, next((index for index, parts in enumerate(called) if id(owner) in parts), len(stages) - 1)


def _refuse(module: nn.Module, inputs: Any) -> None:
    raise UsageError(
        f"this rank holds a part of {type(module).__name__}, which cannot be called; use worker.step(batch), which "
        "computes whole steps, and worker.evaluate()"
    )
