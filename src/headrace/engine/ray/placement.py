"""Where a run's processes go on a Ray cluster: a group of bundles for workers, and one for servers and their backups.

Nothing here imports Ray but in functions, so that what a cluster lacks is said without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from headrace.errors import InfeasiblePlan, UnfitMachine
from headrace.spec.plan import ProcessCounts

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Resources = Mapping[str, float]

SPREAD, PACK, STRICT_PACK, STRICT_SPREAD = PLACEMENTS = ("SPREAD", "PACK", "STRICT_PACK", "STRICT_SPREAD")
_STRICTLY = {STRICT_PACK: " on one node", STRICT_SPREAD: " on nodes of their own"}
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class BundleGroup:
    """Processes of one kind, what each reserves, and how they are placed, by Ray's names of strategies."""

    kind: str
    count: int
    each: Resources
    placement: str


def bundle_groups(counts: ProcessCounts, worker: Resources, placement: str | None) -> list[BundleGroup]:
    """Returns how workers and servers are placed.

    Workers on few nodes, because those of one node share memory; on one, where they must. Servers and backups on many,
    so that a node takes few of them with it.
    """
    chosen = STRICT_PACK if counts.one_host else placement or PACK
    groups = [BundleGroup("worker", counts.workers, worker, chosen)]
    if counts.serving:
        groups.append(BundleGroup("server", counts.serving, {"CPU": 1}, SPREAD))
    return groups


def require_room(groups: Sequence[BundleGroup], nodes: Mapping[str, Resources]) -> None:
    """Raises InfeasiblePlan where an empty cluster of these nodes could not hold the groups."""
    free = {name: dict(node) for name, node in nodes.items()}
    for group in groups:
        if group.placement == STRICT_PACK:
            whole = {name: amount * group.count for name, amount in group.each.items()}
            fits = bool(_take(whole, free))
        elif group.placement == STRICT_SPREAD:
            others = dict(free)
            fits = all(others.pop(_take(group.each, others), None) for _ in range(group.count))
        else:
            fits = all(_take(group.each, free) for _ in range(group.count))
        if not fits:
            together = _STRICTLY.get(group.placement, "") if group.count > 1 else ""
            raise InfeasiblePlan(
                f"the Ray cluster is too small: {_asked(groups)} are asked for, and there is no room for "
                f"{_several(group)}{together}; the nodes have {_per_node(nodes)}; start more nodes, or ask for less"
            )


def place(groups: Sequence[BundleGroup], nodes: Mapping[str, Resources], within_s: float) -> list[PlacementGroup]:
    """Reserves what the groups ask for; the caller removes what is returned.

    Raises:
        InfeasiblePlan: the cluster is too small.
        UnfitMachine: others use what is asked for, and have not freed it in time.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    require_room(groups, nodes)
    made = [placement_group([dict(group.each)] * group.count, strategy=group.placement) for group in groups]
    try:
        give_up = monotonic() + within_s
        for each in made:
            while not each.wait(_LOOK_EVERY_S):
                if monotonic() > give_up:
                    raise UnfitMachine(
                        f"the Ray cluster has not given {_asked(groups)} within {within_s:g} s: it has "
                        f"{_amounts(ray.available_resources())} free, and in all {_per_node(nodes)}; wait for other "
                        "jobs to end (ray status shows them), or ask for less"
                    )
    except BaseException:
        for each in made:
            remove_placement_group(each)
        raise
    return made


def _take(wanted: Resources, free: Mapping[str, dict[str, float]]) -> str:
    """Takes resources from the first node that has them; returns its name, "" if none has."""
    for host, node in free.items():
        if all(node.get(name, 0) >= amount for name, amount in wanted.items()):
            for name, amount in wanted.items():
                node[name] = node.get(name, 0) - amount
            return host
    return ""


def _several(group: BundleGroup) -> str:
    return f"{group.count} {group.kind}{'s' * (group.count > 1)} with {_amounts(group.each)} each"


def _asked(groups: Sequence[BundleGroup]) -> str:
    return " and ".join(_several(group) for group in groups)


def _per_node(nodes: Mapping[str, Resources]) -> str:
    return "; ".join(f"{name}: {_amounts(node)}" for name, node in nodes.items()) or "nothing"


def _amounts(resources: Resources) -> str:
    # Ray also counts memory, and names nodes and kinds of accelerators in this way.
    hidden = ("node:", "memory", "object_store_memory", "accelerator_type:", "bundle")
    shown = {
        name: amount for name, amount in resources.items() if not name.startswith(hidden) and "_group_" not in name
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
