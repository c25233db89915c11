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

from dataclasses import dataclass

from headrace.errors import InfeasiblePlan
from headrace.policies.roles import data_parallel_plan
from headrace.policies.sharding import slices, whole
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.checks import check_balance, check_count
from headrace.strategies.context import WorkerContext
from headrace.strategies.strategy import Strategy, broadcast, describe_options
from headrace.training.central_storage import CentralCopy, CentralStorageExchange
from headrace.training.exchange import Replica
from headrace.training.optimizer import build


@dataclass(frozen=True)
class CentralStorage(Strategy):
    """Parameters and optimizer state once a host (tf.distribute.experimental.CentralStorageStrategy's way).

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        balance: "equal" shares of a batch, or shares that follow the workers' measured "speed".
    """

    workers: int | None = None
    balance: str = "equal"

    name = "central_storage"
    equals_one_device = True
    one_host = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_balance(self.balance)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        if len(cluster.hosts) > 1:
            # docs/ideas/central-storage-against-all-reduce.md says what was measured.
            names = ", ".join(host.name for host in cluster.hosts)
            raise InfeasiblePlan(
                f"central_storage keeps one copy in one host's memory, and this cluster has {len(cluster.hosts)}: "
                f"{names}; between hosts it would send what mirrored sends, so use mirrored there"
            )
        # Each worker: what autograd makes, what it shares; all together: the parameters.
        cut = slices if model.sliceable else whole
        return data_parallel_plan(
            self.name,
            describe_options(self),
            self.workers,
            model,
            cluster,
            copies=(2, 1),
            cut=cut,
            balance=self.balance,
        )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        always = context.synchronise_batch_norm()
        module, model, group = context.module, context.model, context.group
        if context.device.type == "cpu":
            broadcast(module, group)
        copy = CentralCopy(module, model, group, context.device)
        segments = [segment for segment in plan.segments if segment.owner == rank]
        template = build(context.optimizer, module.named_parameters())
        exchange = CentralStorageExchange(segments, model, group, copy, template, context.updater, context.clipper())
        return Replica(context.whole_model(copy.sink, always), exchange)
