"""The one seam of every strategy: decide, describe, build."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import UsageError
from headrace.parameter_server.client.exchange import ReplicaGroup
from headrace.parameter_server.replication.failover import ServerDirectory
from headrace.parameter_server.server.server import Server
from headrace.spec.cluster import Cluster
from headrace.spec.model import LayerSpec, ModelSpec, ProfileRequest
from headrace.spec.options import Options
from headrace.spec.plan import Plan, Segment
from headrace.training.batch_norm import synchronise_batch_norm
from headrace.training.clipping import GradientClipper, LossScale
from headrace.training.compute import Compute
from headrace.training.exchange import Replica
from headrace.training.gradients import GradientSink, SharedGradients
from headrace.training.optimizer import build
from headrace.training.update import Updater
from headrace.training.whole_model import CompiledModule, ModelParallelGroup, Objective, WholeModel


@dataclass(frozen=True)
class WorkerContext:
    """What an engine hands to a strategy in one worker.

    Attributes:
        module: this worker's copy of the model, on its device.
        model: its specification.
        objective: loss and selection.
        optimizer: the job's factory.
        options: the job's.
        group: the workers.
        device_group: connects, at its first call, the collective that carries the devices' own tensors, and returns it;
            returns None where they live in the memory of one host.
        rounds_per_epoch: of the training data.
        full_batch: examples of a round, but for an epoch's last one.
        first: the round that the run begins with.
        closing: closes what a strategy has opened, when the worker ends, however it does.
        servers: what it knows of them.
        sample: returns a batch of the training data's first two examples.
        inside: of a replica that several ranks hold together, where `module`, `model` and `host` are those of what this
            rank holds; None where each rank has a replica.
    """

    module: nn.Module
    model: ModelSpec
    objective: Objective
    optimizer: Callable[..., Any]
    options: Options
    group: ProcessGroup
    device_group: Callable[[], Collective | None] = lambda: None
    rounds_per_epoch: int = 1
    full_batch: int = 1
    first: int = 0
    closing: ExitStack = field(default_factory=ExitStack)
    servers: ServerDirectory = field(default_factory=ServerDirectory)
    sample: Callable[[], Any] = tuple
    inside: ModelParallelGroup | None = None

    @cached_property
    def device(self) -> torch.device:
        """Where the module lives, or has lived before parts of it were let go."""
        here = (parameter.device for parameter in self.module.parameters() if not parameter.is_meta)
        return next(here, torch.device("cpu"))

    @cached_property
    def scale(self) -> LossScale | None:
        """What fp16 multiplies the loss by; one object for compute and exchange, None without fp16."""
        return LossScale() if self.options.precision == "fp16" else None

    def whole_model(self, sink: GradientSink | None = None, always: bool = False, portions: int = 0) -> Compute:
        """Returns the compute of a strategy whose workers have the whole model, or all that there is inside a replica.

        Args:
            sink: see `WholeModel`.
            always: see there.
            portions: where workers do not meet in every round, and weigh their losses by themselves, how many of them
                a round has; else 0.
        """
        graph = CompiledModule(self.module, self.full_batch // max(1, portions)) if self.options.compile else None
        total: Callable[[Sequence[float]], list[float]] = list if portions else self.group.sum
        whole = WholeModel(self.module, self.objective, sink, total, always, self.options, self.scale, graph)
        return self.inside.compute(whole, sink) if self.inside else whole

    def clipper(self, gradients: Mapping[str, Tensor] | None = None) -> GradientClipper:
        """Returns what decides over summed gradients.

        Args:
            gradients: where they are, by parameter; asked for where a replica is held by several ranks.
        """
        immediate, inside = self.device.type == "cpu", self.inside
        if inside is None:
            return GradientClipper(self.options, self.group, self.scale, immediate)
        assert gradients is not None
        repeated = [gradients[name] for name in gradients if name in inside.repeated]
        return GradientClipper(
            self.options, inside.everyone, self.scale, immediate, lambda: repeated, inside.group.world
        )

    def agreement(self) -> ReplicaGroup:
        """Returns what this worker's replica agrees by, where replicas go on by themselves."""
        group = self.inside.group if self.inside else ThreadCollective(ThreadGroup(1), 0)
        return ReplicaGroup(group, self.options, self.scale, self.device)

    def updater(
        self,
        optimizer: torch.optim.Optimizer,
        owned: Sequence[tuple[Segment, Tensor]],
        template: torch.optim.Optimizer | None = None,
    ) -> Updater:
        """Returns what moves the pieces that this worker owns; for `template` see there."""
        return Updater(optimizer, owned, self.options, self.rounds_per_epoch, template, self.scale)

    def updater_of(self, segments: Iterable[Segment]) -> Updater:
        """Returns the job's optimizer over those of the module's parameters, whole, that `segments` name."""
        named = dict(self.module.named_parameters())
        return self.updater(build(self.optimizer, named.items()), [(each, named[each.parameter]) for each in segments])

    def shared_gradients(self) -> SharedGradients:
        """Returns memory for the gradients of all workers of this host; every worker calls it."""
        return SharedGradients(self.model.trainable, self.group)

    def synchronise_batch_norm(self) -> bool:
        """Makes BatchNorm global if the options ask for it; returns whether layers now talk to each other."""
        if self.options.batch_norm != "sync" or self.group.world == 1:
            return False
        return synchronise_batch_norm(self.module, self.device_group() or self.group)


@dataclass(frozen=True)
class ServerContext:
    """What an engine hands to a strategy in one server.

    Attributes:
        model: the model's specification.
        optimizer: the job's factory.
        options: the job's.
        rounds_per_epoch: of the training data.
        first: the round that the run begins with.
        until: the first round before which the workers meet.
        process: the number of this process, where servers have backups; no other process ever has it.
    """

    model: ModelSpec
    optimizer: Callable[..., Any]
    options: Options
    rounds_per_epoch: int
    first: int
    until: int
    process: int = 0


@dataclass(frozen=True)
class ModelProbe:
    """What a strategy may find out about a model before it plans.

    Attributes:
        module: the model; it must stay as it is.
        global_batch_size: the job's.
        cluster: the machines.
        measure: measures the model's layers on this machine, once for all processes of the run.
    """

    module: nn.Module
    global_batch_size: int
    cluster: Cluster
    measure: Callable[[ProfileRequest], tuple[LayerSpec, ...]]


class Strategy(ABC):
    """How a job is distributed: a frozen dataclass of options that decides; what runs comes from other rooms.

    Attributes:
        name: how the command line and `hr.fit` call it.
        synchronous: whether N workers give what one device gives on the same global batch.
        one_model: whether all workers train one model, so that there is one state to save.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool]
    one_model: ClassVar[bool] = True

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        """Returns the model spec with what else `plan` needs; most need nothing. The module stays as it is."""
        return model

    @abstractmethod
    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        """Decides what each process does and which parameters it owns. Pure.

        Raises:
            InfeasiblePlan: the cluster cannot hold it, with the numbers.
        """

    @abstractmethod
    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        """Builds what one worker runs. Every worker calls it; it may talk to the others."""

    def check(self, options: Options) -> None:  # noqa: B027  (most can do all)
        """Refuses options that cannot be had under this strategy.

        Raises:
            UsageError: with the remedy.
        """


class ServedStrategy(Strategy):
    """A strategy whose plans may have servers."""

    @abstractmethod
    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        """Builds what the process of a rank runs that is a server or a backup in the plan."""


def describe_options(strategy: Strategy) -> dict[str, object]:
    """Returns a strategy's fields as JSON values."""
    assert dataclasses.is_dataclass(strategy)
    return dataclasses.asdict(strategy)


def require_own_chance(module: nn.Module, group: ProcessGroup) -> None:
    """Refuses workers that are threads, and draw from one generator, where what each draws must be drawn again.

    Raises:
        UsageError: with the layer that draws.
    """
    if not isinstance(group, ThreadCollective) or group.world == 1:
        return
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise UsageError(
                f"{name!r} draws random numbers, and the workers of ThreadEngine share one generator, so that parts of "
                "one model would disagree; leave out engine=, and they are processes"
            )


def check_count(name: str, count: int | None) -> None:
    """Raises:
    UsageError: `count` is no whole number of at least 1, nor None.
    """
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        remedy = "leave it out for what there is" if name == "workers" else "give a number such as 1 or 2"
        raise UsageError(f"{name} must be a whole number of at least 1, got {count!r}; {remedy}")


def broadcast(module: nn.Module, collective: Collective) -> None:
    """Gives every rank rank 0's parameters and buffers, as far as the ranks hold them."""
    broadcast_tensors((*module.parameters(), *module.buffers()), collective)


def broadcast_tensors(tensors: Iterable[Tensor], collective: Collective) -> None:
    """Gives every rank rank 0's values, as far as the ranks hold the tensors."""
    for tensor in tensors:
        if tensor.is_meta:
            continue
        dense = tensor.data.contiguous()
        collective.broadcast(dense)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(dense)
