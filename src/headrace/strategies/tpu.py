"""Synchronous data parallelism for devices that compile every shape: each step is one program, the same on each core.

    compute                       synchronize                   update
    one compiled program on       all-reduce the gradients,     optimizer on each worker's
    each worker; a short batch    by the device's backend of    own copy
    is padded, at weight 0        torch.distributed

It is `mirrored` with steps of one shape. Such a device compiles a program for every shape that it meets, which takes
much longer than a step; so the last batch of an epoch, which is short, gets the shapes of the others:

    batch of 3 on a worker    │ a │ b │ c │           loss = 1·l(a) + 1·l(b) + 1·l(c) + 0·l(c)
    what its program runs     │ a │ b │ c │ c │
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.devices import kind_of
from headrace.errors import UsageError
from headrace.internals import COMPILER, INDUCTOR
from headrace.policies.behaviour import Behaviour
from headrace.policies.roles import data_parallel_plan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import check_count
from headrace.strategies.context import WorkerContext
from headrace.strategies.refusals import Refusal
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica
from headrace.training.reduction import CollectiveReduction, MirroredExchange
from headrace.training.whole_model import WholeModel


@dataclass(frozen=True)
class TPU(Strategy):
    """Mirrored copies whose steps are one compiled program of fixed shapes, for TPUs; it runs on every device.

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        compiler: backend of `torch.compile`; None for the device's own.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> hr.TPU(workers=8).fixed_shapes, hr.Mirrored(workers=8).fixed_shapes
        (True, False)
    """

    workers: int | None = None
    compiler: str | None = None

    name = "tpu"
    equals_one_device = True
    begins_alike = True
    whole_model = False
    fixed_shapes = True
    collectives = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        if self.compiler is not None and not (isinstance(self.compiler, str) and self.compiler):
            raise UsageError(f"compiler is the name of a backend of torch.compile, or None, got {self.compiler!r}")

    def imports(self) -> tuple[str, ...]:
        return (COMPILER, INDUCTOR) if self.compiler in (None, "inductor") else (COMPILER,)

    def refusals(self) -> tuple[Refusal, ...]:
        why = (
            "batch_norm='sync' lets layers talk to other workers, and a step of "
            f"{self.name} is one program without such talk"
        )
        again = f"the compiler of {self.name} chooses what of its program it computes again"
        return (
            Refusal("batch_norm", "sync", why, "use batch_norm='local', or mirrored"),
            Refusal("recompute", None, again, "leave recompute out, or use mirrored"),
        )

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        # Each worker: its copy, what autograd makes, and the sum.
        return data_parallel_plan(
            self.name, describe_options(self), self.workers, model, cluster, copies=(3, 0), spread=True
        )

    def behave(self, workers: int) -> Behaviour:
        like = "its numbers are those of mirrored, to the order of additions; rehearse that"
        return replace(super().behave(workers), not_rehearsed=like)

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        # Here, because importing the compiler costs what the other strategies need not pay.
        from headrace.training.fixed_shapes.program import FixedShapes

        group, device, options = context.group, context.device, context.options
        collective = context.device_group() or group
        broadcast(context.module, collective)
        reduction = CollectiveReduction(context.model.trainable, group, collective, device)
        share = -(-context.batches.full // plan.workers)
        examples = -(-share // options.accumulate)
        compiler = self.compiler or kind_of(device.type).compiler
        program = FixedShapes(context.module, context.objective, examples, device, compiler)
        compute = WholeModel(
            context.module, context.objective, reduction.sink, group.sum, False, options, context.scale, program
        )
        if rank == 0:
            compute.notes = (f"a step is one program for {examples} examples a worker, compiled by {compiler}",)
        updater = context.updater_of(plan.segments)
        views = dict(zip(reduction.layout.names, reduction.layout.views(reduction.result), strict=True))
        named = dict(context.module.named_parameters())
        parameters = [named[name] for name in views]
        exchange = MirroredExchange(
            updater, context.clipper(views), reduction, parameters, context.model.parameter_bytes, copies=False
        )
        return Replica(compute, exchange)
