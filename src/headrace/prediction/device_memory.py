"""Whether a plan's whole models fit on the devices of its workers."""

from __future__ import annotations

from headrace.devices import HOST
from headrace.errors import InfeasiblePlan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import EVERY_WORKER, Plan, place_of


def require_device_memory(plan: Plan, model: ModelSpec, cluster: Cluster) -> None:
    """Refuses whole models that do not fit on workers' devices even without activations, where that memory is known.

    Raises:
        InfeasiblePlan: with the numbers, and what would fit.
    """
    rooms = {host.name: host.device_memory_bytes for host in cluster.hosts}
    # What has one owner is updated elsewhere: by servers, or in the copy that the ranks of a host share.
    copies = model.copies if all(each.owner == EVERY_WORKER for each in plan.segments) else 2
    needed = model.parameter_bytes + (copies - 1) * model.trainable_bytes
    for role in plan.roles:
        room, mates = rooms.get(role.host, 0), sum(place_of(each) == place_of(role) for each in plan.roles)
        if not role.computes or role.device == HOST or not room or needed * mates <= room:
            continue
        of = f" of each of {mates} workers that share it" if mates > 1 else ""
        enough = -(-(model.parameter_bytes + (model.copies - 1) * model.trainable_bytes) // room)
        raise InfeasiblePlan(
            f"{plan.strategy} needs {needed * mates:,} bytes on {role.device} of {role.host} for parameters, gradients "
            f"and what the optimizer keeps{of}, and it has {room:,}: {needed * mates - room:,} too few, before any "
            f"activations; use fully_sharded, whose workers each keep a part ({enough} devices or more), an optimizer "
            "that keeps less, or device='cpu'"
        )
