"""Which part of the data is a worker's: of all that there is, or of what its host stores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.collectives.base import ProcessGroup
from headrace.data import Hosts, InputPipeline
from headrace.errors import UsageError
from headrace.spec.plan import Plan, Role


@dataclass(frozen=True)
class DataAssignment:
    """What a `Loader` is told.

    Attributes:
        pipeline: knows who has how much, where hosts list examples of their own.
        shares: relative weights of those among whom it is split: all workers, or those of this host.
        rank: which of them this worker is.
    """

    pipeline: InputPipeline
    shares: tuple[int, ...]
    rank: int


def assign_data(pipeline: InputPipeline, plan: Plan, role: Role, group: ProcessGroup) -> DataAssignment:
    """Finds a worker's; where hosts list examples of their own, all workers call it together.

    Raises:
        UsageError: each worker may get any portion, and hosts list examples of their own.
    """
    # Leased portions are nobody's share.
    shares = (1,) * plan.replicas if plan.servers else plan.shares
    workers = [other for other in plan.roles if other.kind == "worker"]
    names = list(dict.fromkeys(worker.host for worker in workers))
    if pipeline.hosts is None or len(names) == 1:
        return DataAssignment(pipeline, shares, role.data_rank)
    if plan.servers:
        raise UsageError(
            f"{plan.strategy} hands any portion to any worker, and hr.data.local says that each of {len(names)} hosts "
            "stores another part; give every host all data, or train without servers: mirrored"
        )
    near = [worker for worker in workers if worker.host == role.host]
    mates = sorted({worker.data_rank for worker in near})
    mine = names.index(role.host)
    # One of each host says how much it has.
    told = [0.0] * len(names)
    told[mine] = float(len(pipeline)) if role.rank == min(worker.rank for worker in near) else 0.0
    counts = tuple(map(int, group.sum(told)))
    known = replace(pipeline, hosts=Hosts(counts, mine))
    return DataAssignment(known, tuple(shares[mate] for mate in mates), mates.index(role.data_rank))
