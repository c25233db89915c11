"""The nodes that a run has: their names, which rank is on which, and the cluster that a strategy plans for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from headrace.devices import GPU, HOST
from headrace.errors import UnfitMachine
from headrace.machine.identity import installed_versions
from headrace.spec.cluster import Cluster, Host

Description = Mapping[str, Any]
"""What `RankAgent.describe` returns."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is.

    Attributes:
        agent: the number of its agent, in the order of their start.
        host: the node's name in the run.
        node: its id, which no other node ever has.
        gpus: the ids that Ray has given to all ranks of the node, by rank; "" for none.
    """

    agent: int
    host: str
    address: str
    gpus: str
    node: str


def names_of(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns a name for each node, by its id: that of `ray start --node-name`, else of its machine."""
    # Where it was given none, Ray names a node by its address.
    unnamed = {True: "NodeManagerHostname", False: "NodeName"}
    given = {node["NodeID"]: node[unnamed[node["NodeName"] == node["NodeManagerAddress"]]] for node in nodes}
    names = list(given.values())
    # Several nodes may be on one machine.
    return {key: name if names.count(name) == 1 else f"{name}-{key[:6]}" for key, name in given.items()}


def require_versions(told: Sequence[Description], names: Mapping[str, str]) -> None:
    """Raises UnfitMachine for a node whose versions are not this process's."""
    for what, mine in installed_versions().items():
        for each in told:
            if each["versions"][what] != mine:
                raise UnfitMachine(
                    f"{names[each['node']]} has {what} {each['versions'][what]}, and this process {mine}; install the "
                    "same on all nodes"
                )


def arrange(told: Sequence[Description], names: Mapping[str, str], first: str, workers: int) -> list[RankPlace]:
    """Returns the place of each rank: the workers of one node follow each other, those of the node `first` first.

    Servers and backups take turns over the nodes, so that a server and its backup are on two.
    """
    order = [
        *chain.from_iterable(_by_node(told, range(workers), first)),
        *(agent for turn in zip_longest(*_by_node(told, range(workers, len(told)), first)) for agent in turn),
    ]
    order = [agent for agent in order if agent is not None]
    gpus: dict[str, list[str]] = {}
    for agent in order:
        gpus.setdefault(told[agent]["node"], []).extend(told[agent]["gpus"])
    return [
        RankPlace(agent, names[each["node"]], each["address"], ",".join(gpus[each["node"]]), each["node"])
        for agent in order
        for each in [told[agent]]
    ]


def _by_node(told: Sequence[Description], agents: range, first: str) -> list[list[int]]:
    found: dict[str, list[int]] = {first: []}
    for agent in agents:
        found.setdefault(told[agent]["node"], []).append(agent)
    return [each for each in found.values() if each]


def cluster_of(places: Sequence[RankPlace], told: Sequence[Description], workers: int, cpus: int | None) -> Cluster:
    """Returns the cluster of the ranks; with `cpus` a host has so many cores for each of its workers."""
    return Cluster(tuple(_hosts(places, told, workers, cpus)), len(places), GPU if places[0].gpus else HOST)


def _hosts(places: Sequence[RankPlace], told: Sequence[Description], workers: int, cpus: int | None) -> Iterator[Host]:
    for name in dict.fromkeys(place.host for place in places):
        ranks = tuple(rank for rank, place in enumerate(places) if place.host == name)
        place = places[ranks[0]]
        each = told[place.agent]
        cores = cpus * max(1, sum(rank < workers for rank in ranks)) if cpus else each["cores"]
        count = len(place.gpus.split(",")) if place.gpus else 0
        devices = tuple(f"{GPU}:{index}" for index in range(count))
        yield Host(name, cores, each["memory_bytes"], devices, ranks, place.address)
