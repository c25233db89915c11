"""Which ranks of a hybrid have what in common, and which of them a level is planned on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from headrace.spec.cluster import Cluster, Host
from headrace.spec.plan import EVERY_WORKER, Plan, Segment

ENOUGH_BYTES = 2**62
"""Memory of a host of which nothing is asked."""


class RankGroups:
    """The ranks with which a rank of a hybrid has what in common; `counts` are of replicas, parts, stages, slices.

    Attributes:
        replicas, parts, stages, slices: the ranks that differ from it in that alone.
        slice: which it has.
        devices: those of its replica.
        mates: those that have the same stage and slice, in all replicas and parts.
        column: those that have the same slice.
        sharded: those that have the same replica and stage.
        alike: those that have the same part and stage.
    """

    def __init__(self, counts: tuple[int, int, int, int], rank: int) -> None:
        steps = [*accumulate(reversed(counts), mul, initial=1)][-2::-1]
        places = [rank // step % count for step, count in zip(steps, counts, strict=True)]

        def along(*levels: int) -> list[int]:
            ranks = [0]
            for level, (step, count) in enumerate(zip(steps, counts, strict=True)):
                here = range(count) if level in levels else [places[level]]
                ranks = [first + step * place for first in ranks for place in here]
            return ranks

        self.replicas, self.parts, self.stages, self.slices = (along(level) for level in range(4))
        self.slice = places[3]
        self.devices, self.mates, self.column = along(2, 3), along(0, 1), along(0, 1, 2)
        self.sharded, self.alike = along(1, 3), along(0, 3)


def cluster_of(plan: Plan) -> Cluster:
    """Returns a cluster that says no more than how many ranks a plan has."""
    return Cluster((Host(plan.roles[0].host, 1, ENOUGH_BYTES),), ranks=len(plan.roles))


def with_slices(plan: Plan, parts: Sequence[Segment], slices: int) -> Plan:
    """Returns the plan of workers each of which is so many ranks, with slices of what it holds."""
    return replace(
        plan,
        roles=tuple(replace(role, data_rank=role.rank // slices, stage=role.rank % slices) for role in plan.roles),
        shares=(1,) * (plan.workers // slices),
        segments=tuple(
            each if each.owner == EVERY_WORKER else replace(each, owner=each.owner * slices) for each in parts
        ),
    )


def slices_of(groups: int, slices: int) -> list[range]:
    return [range(first, first + slices) for first in range(0, groups * slices, slices)]


def stages_of(replicas: int, stages: int, slices: int) -> list[range]:
    """Returns of each replica the ranks that have its stages, or their first slices; the devices where it has none."""
    devices = stages * slices
    step = slices if stages > 1 else 1
    return [range(first, first + devices, step) for first in range(0, replicas * devices, devices)]


def alone(cluster: Cluster, groups: Sequence[range]) -> Cluster:
    """Returns a cluster of one of the groups of ranks, that on most hosts: whether all fit is asked elsewhere."""
    size = len(groups[0])
    if len(cluster.hosts) == 1 or cluster.ranks is None or cluster.ranks < groups[0].stop:
        host = replace(cluster.hosts[0], memory_bytes=ENOUGH_BYTES, ranks=())
        return replace(cluster, hosts=(host,), ranks=size if cluster.ranks else None)
    # Of each group, the places of its hosts and the ranks that each has.
    spread: list[dict[int, list[int]]] = [{} for _ in groups]
    for place, host in enumerate(cluster.hosts):
        for ranks, group in zip(spread, groups, strict=True):
            if here := [group.index(rank) for rank in host.ranks if rank in group]:
                ranks[place] = here
    widest = max(spread, key=len)
    hosts = (replace(cluster.hosts[place], memory_bytes=ENOUGH_BYTES, ranks=tuple(widest[place])) for place in widest)
    return replace(cluster, hosts=tuple(hosts), ranks=size)
