"""Central storage: one copy of parameters and optimizer state in the host's memory, for all replicas.

    compute                             synchronize                  update
    the same on each worker, on         each worker reduces its      each worker updates its
    parameters read from the one copy   slice of the gradients       slice of the one copy

On a CPU host the model's parameters *are* the one copy: nothing is fetched. On GPUs each replica fetches the
copy before it computes and brings its gradients to host memory after.

    worker 0   │ grads ──► G0 ─┐            ┌─► sum of slice 0 ──► optimizer on P[slice 0] ─┐
               │               ├─ barrier ──┤                                               ├─ barrier
    worker 1   │ grads ──► G1 ─┘            └─► sum of slice 1 ──► optimizer on P[slice 1] ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.devices import HOST
from headrace.errors import InfeasiblePlan
from headrace.policies.behaviour import Behaviour, GradientSum
from headrace.policies.roles import data_parallel_plan, elastic_plan
from headrace.policies.segments import slices
from headrace.policies.sharding import whole
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import Plan, Segment
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import (
    check_balance,
    check_count,
    check_elastic,
    refuse_elastic_tables,
    refuse_measured,
    refuse_random,
)
from headrace.strategies.context import WorkerContext, with_tables
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.central_storage.elastic import ElasticStorageExchange, StorageState
from headrace.training.central_storage.exchange import CentralCopy, CentralStorageExchange
from headrace.training.central_storage.shared_state import state_form
from headrace.training.exchange import Replica


@dataclass(frozen=True)
class CentralStorage(Strategy):
    """Parameters and optimizer state once a host (tf.distribute.experimental.CentralStorageStrategy's way).

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        balance: "equal" shares of a batch, or shares that follow the workers' measured "speed".
        min_workers, max_workers: as in `Mirrored`. With `min_workers` the one copy is kept twice, so that what a lost
            worker was changing can be had as it was before.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.CentralStorage(workers=2))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    workers: int | None = None
    balance: str = "equal"
    min_workers: int | None = None
    max_workers: int | None = None

    name = "central_storage"
    equals_one_device = True
    begins_alike = True
    one_host = True
    sparse_tables = True
    turns = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_balance(self.balance)
        check_elastic(self.workers, self.min_workers, self.max_workers, self.balance)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        if len(cluster.hosts) > 1:
            # docs/ideas/central-storage-against-all-reduce.md says what was measured.
            names = ", ".join(host.name for host in cluster.hosts)
            raise InfeasiblePlan(
                f"central_storage keeps one copy in one host's memory, and this cluster has {len(cluster.hosts)}: "
                f"{names}; between hosts it would send what mirrored sends, so use mirrored there"
            )
        refuse_elastic_tables(model, self.min_workers)
        if self.min_workers is not None and cluster.device != HOST:
            raise InfeasiblePlan(
                f"min_workers={self.min_workers} lets workers come and go, and those of {self.name} then compute with "
                f"the one copy itself, in host memory, where {cluster.device} cannot; leave out min_workers, or use "
                "mirrored"
            )
        if self.min_workers is not None and not model.sliceable:
            raise InfeasiblePlan(
                f"min_workers={self.min_workers} lets workers come and go, and the slices of the one copy change with "
                "them; the job's optimizer needs whole parameters: leave out min_workers, or use mirrored"
            )
        if self.min_workers is not None and model.optimizer.modes:
            raise InfeasiblePlan(
                f"min_workers={self.min_workers} lets workers come and go, also while the optimizer is in its eval "
                "mode, which the others would not know; leave out min_workers, or use mirrored"
            )
        # Each worker: what autograd makes, what it shares; all together: the parameters, twice if they are kept.
        cut = _all_to_one if model.optimizer.coupled else slices if model.sliceable else whole
        plan = data_parallel_plan(
            self.name,
            describe_options(self),
            self.workers,
            model,
            cluster,
            copies=(2, 1 if self.min_workers is None else 2),
            cut=cut,
            balance=self.balance,
        )
        refuse_random(self.name, model, plan)
        return elastic_plan(plan, self.min_workers, self.max_workers, cluster)

    def behave(self, workers: int) -> Behaviour:
        summed = GradientSum(by_speed=self.balance == "speed", central=True)
        return Behaviour(summed, not_rehearsed=refuse_measured(self.balance))

    def refuses_channels_last(self) -> str:
        if self.min_workers is None:
            return ""
        return (
            f"min_workers={self.min_workers} lets workers come and go, and the slices of the one copy change with them "
            "between any two elements; leave out min_workers, or use mirrored"
        )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        always = context.synchronise_batch_norm()
        module, model, group = context.module, context.model, context.group
        if context.device.type == "cpu":
            broadcast(module, group)
        if plan.min_workers:
            return self._elastic_replica(context, always)
        copy = CentralCopy(module, model, group, context.device, "loop" in context.user_code)
        segments = [segment for segment in plan.segments if segment.owner == rank]
        exchange = CentralStorageExchange(
            segments, model, group, copy, context.updater_over, context.clipper(in_host=True)
        )
        return with_tables(Replica(context.whole_model(copy.sink, always), exchange), context)

    def _elastic_replica(self, context: WorkerContext, always: bool) -> Replica:
        module, model = context.module, context.model
        averages = context.options.ema_decay is not None
        form = state_form(context.optimizer, module.named_parameters(), model, averages)
        exchange = ElasticStorageExchange(
            lambda workers: slices(model.parameters, workers), model, context.group, module, form, context.updater_over,
            context.clipper(in_host=True), context.scale,
        )  # fmt: skip
        compute = context.whole_model(exchange.sink, always)
        return Replica(compute, exchange, elastic=StorageState(exchange))


def _all_to_one(parameters: Sequence[ParameterSpec], workers: int) -> tuple[Segment, ...]:
    """Gives all parameters to the first worker, for an optimizer that looks at several of them together."""
    return whole(parameters, 1)
