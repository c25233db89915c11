"""What the engine hands to a strategy: in a worker, and before it plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective
from headrace.devices import HOST, kind_of
from headrace.errors import UsageError
from headrace.internals import DropoutNd
from headrace.spec.cluster import Cluster
from headrace.spec.compute import LayerSpec
from headrace.spec.model import ModelSpec, ProfileRequest
from headrace.spec.options import Options
from headrace.spec.plan import Segment
from headrace.training.clipping import GradientClipper, LossScale
from headrace.training.compute import Compute
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.exchange import Replica
from headrace.training.gradients import GradientSink, SharedGradients
from headrace.training.on_device.totals import DeviceTotal, Total
from headrace.training.optimizer import build, build_over
from headrace.training.update import Updater
from headrace.training.user_code.objective import Objective
from headrace.training.whole_model import Connects, ModelParallelGroup, WholeModel

if TYPE_CHECKING:
    from headrace.parameter_server.replication.directory import ServerDirectory
    from headrace.training.on_device.clipping import DeviceClipping
    from headrace.training.on_device.found_inf import FoundInf
    from headrace.weights.reading import StoredValues

_HOST = torch.device("cpu")


def _no_servers() -> ServerDirectory:
    raise AssertionError("the plan has no servers")


@dataclass(frozen=True)
class BatchInfo:
    """What a strategy may know of the run's global batches.

    Attributes:
        full: examples of each, but for an epoch's last one.
        seed: of the job, the same on all workers: for what a strategy draws, too.
    """

    full: int = 1
    seed: int = 0


@dataclass(frozen=True)
class WorkerContext:
    """What an engine hands to a strategy in one worker.

    Attributes:
        module: this worker's copy of the model, on its device; `model` is its specification.
        optimizer: the job's factory.
        group: the workers.
        device_group: connects, at its first call, the collective that carries the devices' own tensors, and returns it;
            returns None where they live in the memory of one host. It goes through host memory on an accelerator where
            no backend carries the tensors of all workers.
        rounds_per_epoch: of the training data.
        batches: what is known of the global batches.
        first: the round that the run begins with.
        closing: closes what a strategy has opened, when the worker ends, however it does.
        servers: returns what it knows of them; a plan without servers has none to know.
        sample: returns a batch of the training data's first two examples.
        user_code: what of it sees the model between rounds: "loop", "callbacks".
        weights: what reads what this rank holds of the model's stored values; None where there are none to read.
        log: `log(name, value, round_)` writes a number of the strategy's own as an event of this rank, which trackers
            show as a curve.
        inside: of a replica that several ranks hold together, where `module`, `model` and `group` are those of what
            this rank holds; None where each rank has a replica.
    """

    module: nn.Module
    model: ModelSpec
    objective: Objective
    optimizer: Callable[..., Any]
    options: Options
    group: ProcessGroup
    device_group: Callable[[], Collective | None] = lambda: None
    rounds_per_epoch: int = 1
    batches: BatchInfo = BatchInfo()
    first: int = 0
    closing: ExitStack = field(default_factory=ExitStack)
    servers: Callable[[], ServerDirectory] = _no_servers
    sample: Callable[[], Any] = tuple
    user_code: frozenset[str] = frozenset()
    weights: StoredValues | None = None
    log: Callable[[str, Any, int], None] = lambda name, value, round_: None
    inside: ModelParallelGroup | None = None

    @cached_property
    def device(self) -> torch.device:
        """Where the module lives, or has lived before parts of it were let go."""
        here = (parameter.device for parameter in self.module.parameters() if not parameter.is_meta)
        return next(here, _HOST)

    @cached_property
    def scale(self) -> LossScale | None:
        """What fp16 multiplies the loss by; one object for compute and exchange, None without fp16."""
        return LossScale() if self.options.precision == "fp16" else None

    @cached_property
    def found_inf(self) -> FoundInf | None:
        """What masks updates on the device, one object for clipper and updater; None where no round may be left out."""
        skips = self.options.on_nonfinite == "skip" or self.scale is not None
        if self.device.type == "cpu" or not skips:
            return None
        from headrace.training.on_device.found_inf import FoundInf

        return FoundInf()

    def whole_model(self, sink: GradientSink | None = None, always: bool = False, local_shares: int = 0) -> Compute:
        """Returns the compute of a strategy whose workers have the whole model, or all that there is inside a replica.

        `sink` and `always` are those of `WholeModel`. Where workers do not synchronize in every round, and weigh their
        losses by themselves, `local_shares` is the number of shares of a round; else 0.
        """

        def whole() -> WholeModel:
            graph = None
            if self.options.compile:
                from headrace.training.fixed_shapes.graph_mode import CompiledModule

                graph = CompiledModule(self.module, self.batches.full // max(1, local_shares), self.options.compile)
            total = list if local_shares else total_of(self)
            return WholeModel(self.module, self.objective, sink, total, always, self.options, self.scale, graph)

        return self.inside.compute(whole, sink, self.scale) if self.inside else whole()

    def clipper(self, gradients: Mapping[str, Tensor] | None = None, in_host: bool = False) -> GradientClipper:
        """Returns what decides over summed gradients: by parameter, if several ranks hold a replica.

        `in_host` says that the sums lie in host memory, where that is not to be seen from `gradients`.
        """
        # By where the sum lies, and not this worker's device: all workers must check alike.
        place = _HOST if in_host else next((each.device for each in (gradients or {}).values()), self.device)
        immediate, inside = place.type == "cpu", self.inside
        group, counts, repeated = self.group, (1, 1), list[Tensor]()
        if inside is not None:
            assert gradients is not None
            group, counts = inside.everyone, (inside.times, inside.stages)
            repeated = [gradients[name] for name in gradients if name in inside.repeated]
        connect = inside.connects[1] if inside else self.device_group
        there = on_device(self, self.options, group, place, connect, lambda: repeated, *counts)
        return GradientClipper(self.options, group, self.scale, immediate, lambda: repeated, *counts, there)

    def updater_over(
        self, owned: Sequence[tuple[Segment, Tensor]], named: Iterable[tuple[str, Tensor]] | None = None
    ) -> Updater:
        """Returns the job's optimizer over pieces of parameters.

        `named` are the whole parameters, if the module does not have them as they are; see `build_over`.
        """
        every = self.module.named_parameters() if named is None else named
        needs = self.model.optimizer
        optimizer, tensors = build_over(self.optimizer, every, owned, needs.values, needs.gradients)
        pieces = [(segment, each) for (segment, _), each in zip(owned, tensors, strict=True)]
        idle = not owned and bool(needs.coupled)
        # What lies in host memory is updated there, by the host's decision.
        found = None if any(each.device.type == HOST for _, each in owned) else self.found_inf
        return Updater(optimizer, pieces, self.options, self.rounds_per_epoch, self.scale, idle, found)

    def updater_of(self, segments: Iterable[Segment]) -> Updater:
        """Returns the job's optimizer over those of the module's parameters, whole, that `segments` name."""
        named = dict(self.module.named_parameters())
        owned = [(each, named[each.parameter]) for each in segments]
        optimizer = build(self.optimizer, named.items())
        return Updater(optimizer, owned, self.options, self.rounds_per_epoch, self.scale, found=self.found_inf)

    def shared_gradients(self) -> SharedGradients:
        """Returns memory for the gradients of all workers of this host; every worker calls it."""
        return SharedGradients(self.model.trainable, self.group)

    def synchronise_batch_norm(self) -> bool:
        """Makes BatchNorm global if the options ask for it; returns whether layers now talk to each other."""
        if self.options.batch_norm != "sync" or (self.group.world == 1 and self.group.fixed):
            return False
        from headrace.training.shared_buffers.batch_norm import synchronise_batch_norm

        return synchronise_batch_norm(self.module, self.device_group() or self.group)

    def require_own_generators(self) -> None:
        """Refuses workers that are threads, and share a random generator, if what each draws must be drawn again.

        Raises:
            UsageError: with the layer that draws.
        """
        if not isinstance(self.group, ThreadCollective) or self.group.world == 1:
            return
        for name, layer in self.module.named_modules():
            if isinstance(layer, DropoutNd) and layer.p > 0:
                raise UsageError(
                    f"{name!r} draws random numbers, and the workers of ThreadEngine share one generator, so that "
                    "parts of one model would disagree; leave out engine=, and they are processes"
                )


def _carrier(connect: Connects, group: ProcessGroup, place: torch.device) -> tuple[bool, Collective | None]:
    """Returns whether what lies on an accelerator can be summed there, over the workers of a group, and by what."""
    # Of a group whose members may be lost, each round ends when all know that it is done.
    if place.type == HOST or not group.fixed:
        return False, None
    if group.world == 1:
        return True, None
    devices = connect() if kind_of(place.type).backend else None
    carries = devices is not None and not devices.in_host and devices.world == group.world
    return carries, devices if carries else None


def total_of(context: WorkerContext) -> Total:
    """Returns what sums the weights of losses over the workers: on their devices, where that can be."""
    group, device = context.group, context.device
    known, devices = _carrier(context.device_group, group, device) if context.objective.weighed else (False, None)
    return DeviceTotal(devices, device) if known else group.sum


def on_device(
    context: WorkerContext,
    options: Options,
    group: ProcessGroup,
    place: torch.device,
    connect: Connects,
    repeated: Callable[[], Sequence[Tensor]] = tuple,
    times: int = 1,
    stages: int = 1,
    first: int = 0,
) -> DeviceClipping | None:
    """Returns what decides on an accelerator, where the gradients of `group` lie; None where the host decides.

    `repeated`, `times` and `stages` are as of `GradientClipper`, `first` is the first rank of the group.
    """
    known, devices = _carrier(connect, group, place)
    if not known:
        return None
    from headrace.training.on_device.clipping import DeviceClipping

    clip = options.clip_norm, options.clip_value
    again = repeated, (times - 1) * stages / group.world
    rank = first + group.rank
    return DeviceClipping(rank, clip, devices, context.scale, context.found_inf, place, *again)


def among(context: WorkerContext, group: ProcessGroup, members: Sequence[int]) -> Callable[[], Collective | None]:
    """Returns what connects the devices of some of the workers, whose processes are `group`."""

    def connect() -> Collective | None:
        every = context.device_group()
        return every.among(group, members) if every else None

    return connect


def summing_of(context: WorkerContext) -> tuple[Collective | None, torch.device]:
    """Returns what sums the workers' gradients, None where they share memory, and the device where the sum lies.

    That is the worker's own device, or host memory where no backend carries the tensors of all devices.
    """
    devices = context.device_group()
    return (devices.near, _HOST) if devices is not None and devices.in_host else (devices, context.device)


def with_tables(replica: Replica, context: WorkerContext) -> Replica:
    """Lets each worker hold and update the rows of the model's tables, where the model has some."""
    layers = tuple(sparse_layers(context.module))
    if not layers:
        return replica
    from headrace.training.embeddings.exchange import TablesExchange
    from headrace.training.embeddings.updater import RowUpdater

    updater = RowUpdater(context.optimizer, context.model, context.options, context.rounds_per_epoch)
    return replace(replica, exchange=TablesExchange(replica.exchange, layers, updater, context.group))


@dataclass(frozen=True)
class ModelProbe:
    """What a strategy may find out about a model before it plans.

    The module must stay as it is. `measure` measures its layers on this machine, once for all processes of the run;
    `sample` returns a batch of the training data's first two examples, of which the model takes `inputs`, as in `Job`.
    `tries` is whether what the model computes can be compared: in a plan of memory tensors have no values.
    """

    module: nn.Module
    global_batch_size: int
    cluster: Cluster
    measure: Callable[[ProfileRequest], tuple[LayerSpec, ...]]
    sample: Callable[[], Any] = tuple
    inputs: Any = None
    clip_norm: float | None = None
    accumulate: int = 1
    tries: bool = True
