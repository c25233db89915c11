"""Synchronous data parallelism: every worker holds a mirror of every variable.

    compute                       synchronize                                   update
    the same on each worker,      all-reduce the gradients: through shared      optimizer on each mirror
    each on its share             memory on a CPU host, NCCL among GPUs,
                                  encrypted between hosts

Where devices are of several kinds, gradients are copied to host memory, summed there as on CPUs, and copied back.

On a CPU host, gradients go from autograd straight into shared memory. Rank r adds up the r-th part of all
workers' gradients into one result that every worker's optimizer reads in place:

    worker 0   │ grads ──► G0 ─┐            ┌─► R[part 0] ─┐
               │               ├─ barrier ──┤              ├─ barrier ──► optimizer.step on R, each its mirror
    worker 1   │ grads ──► G1 ─┘            └─► R[part 1] ─┘
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import InfeasiblePlan, UnknownName
from headrace.policies.behaviour import Behaviour, GradientSum
from headrace.policies.roles import data_parallel_plan, elastic_plan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import (
    check_balance,
    check_count,
    check_elastic,
    refuse_elastic_tables,
    refuse_measured,
    refuse_random,
)
from headrace.strategies.context import WorkerContext, summing_of, with_tables
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica
from headrace.training.gradients import GradientSink
from headrace.training.reduction import (
    BucketReduction,
    CollectiveReduction,
    MirroredExchange,
    MirroredState,
    Reduction,
    SharedMemoryReduction,
    may_write_gradients,
)
from headrace.transport.codec import CODECS, sent_share


@dataclass(frozen=True)
class Mirrored(Strategy):
    """Mirrored variables, all-reduced gradients (tf.distribute.MirroredStrategy's and DDP's way).

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        overlap: exchange gradients among devices, or hosts, while backward still runs.
        codec: how gradients travel between hosts: "plain", "bf16", or "int8" with error feedback.
        balance: "equal" shares of a batch, or shares that follow the workers' measured "speed".
        min_workers: go on without lost workers while so many are left; None for all, so that the run ends with the
            first that is lost. The others do the lost round again, and divide the same global batch among them.
        max_workers: start processes in place of lost ones, and let others join, up to so many; None for neither.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.Mirrored(workers=2))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    workers: int | None = None
    overlap: bool = True
    codec: str = "plain"
    balance: str = "equal"
    min_workers: int | None = None
    max_workers: int | None = None

    name = "mirrored"
    equals_one_device = True
    begins_alike = True
    collectives = True
    sparse_tables = True
    turns = True
    mixes_devices = True
    keeps_memory = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_balance(self.balance)
        if self.codec not in CODECS:
            raise UnknownName("codec", self.codec, CODECS)
        check_elastic(self.workers, self.min_workers, self.max_workers, self.balance)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        self.require_network(self.name, cluster)
        refuse_elastic_tables(model, self.min_workers)
        # Each worker: its mirror, what autograd makes, what it shares; all together: the result.
        plan = data_parallel_plan(
            self.name,
            describe_options(self),
            self.workers,
            model,
            cluster,
            copies=(3, 1),
            spread=True,
            balance=self.balance,
        )
        refuse_random(self.name, model, plan)
        return elastic_plan(plan, self.min_workers, self.max_workers, cluster)

    def behave(self, workers: int) -> Behaviour:
        summed = GradientSum(sent_share(self.codec), self.overlap, self.balance == "speed")
        return Behaviour(summed, not_rehearsed=refuse_measured(self.balance))

    def refuses_channels_last(self) -> str:
        if self.codec == "plain":
            return ""
        return f"what codec={self.codec!r} has rounded is kept in the usual order; use codec='plain'"

    def require_network(self, name: str, cluster: Cluster) -> None:
        """Refuses a codec with an `InfeasiblePlan` where nothing travels between hosts, in a strategy of this name."""
        if self.codec != "plain" and len(cluster.hosts) == 1:
            raise InfeasiblePlan(
                f"{name} has codec={self.codec!r}, which saves bytes between hosts, and there is one host; use "
                "codec='plain'"
            )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        always = context.synchronise_batch_norm()
        # If layers communicate during backward, a bucket that lacks a gradient on one worker would meet their sums.
        # A stage of a pipeline adds up micro-batches by itself: gradients leave when backward is over.
        at_end = context.inside is not None and context.inside.piecewise
        overlap = self.overlap and not always and not at_end
        sink, exchange = summed_by_all(plan, context, overlap, self.codec)
        elastic = None if context.group.fixed else MirroredState(exchange)
        return with_tables(Replica(context.whole_model(sink, always), exchange, elastic=elastic), context)


def summed_by_all(
    plan: Plan, context: WorkerContext, overlap: bool, codec: str = "plain"
) -> tuple[GradientSink, MirroredExchange]:
    """Returns where workers' gradients go, and what sums them and updates each worker's mirror of all parameters.

    Every worker calls it, and then has the first one's parameters. `overlap` is whether gradients leave in backward.
    """
    group, module, trainable = context.group, context.module, context.model.trainable
    broadcast(module, context.device_group() or group)
    summing, place = summing_of(context)
    reduction: Reduction
    if summing is None:
        reduction = SharedMemoryReduction(trainable, group)
    elif overlap or place.type != "cpu":
        reduction = BucketReduction(trainable, group, summing, module, place, codec, overlap)
    else:
        reduction = CollectiveReduction(trainable, group, summing, place, codec)
    updater = context.updater_of(plan.segments)
    views = dict(zip(reduction.layout.names, reduction.layout.views(reduction.result), strict=True))
    # Not get_parameter(), which script modules lack.
    named = dict(module.named_parameters())
    parameters = [named[name] for name in views]
    shares = summing is None and (group.world > 1 or not group.fixed)
    copies = place != context.device or (shares and (updater.patched or may_write_gradients(updater.optimizer)))
    exchange = MirroredExchange(
        *(updater, context.clipper(views), reduction, parameters),
        *(context.model.parameter_bytes, copies, bool(context.user_code)),
    )
    return reduction.sink, exchange


MultiWorkerMirrored = Mirrored
"""TensorFlow's name for what `Mirrored` is over several hosts."""
