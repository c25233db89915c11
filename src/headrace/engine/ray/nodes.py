"""The nodes that a run has: their names, which rank is on which, and the cluster that a strategy plans for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from headrace.devices import DEVICES, GPU, HOST
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
        gpus: the ids that Ray has given to the ranks of the node, each once; "" for none.
        device: this rank's among them, as its process calls it.
        identity: its UUID, where it is a part of a GPU, of which a process sees its own alone.
    """

    agent: int
    host: str
    address: str
    gpus: str
    node: str
    device: str = HOST
    identity: str = ""


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
    # A GPU that Ray has given to several, each a fraction, once.
    gpus: dict[str, dict[str, None]] = {}
    for agent in order:
        gpus.setdefault(told[agent]["node"], {}).update(dict.fromkeys(told[agent]["gpus"]))
    return [
        RankPlace(
            *(agent, names[each["node"]], each["address"], ",".join(gpus[each["node"]]), each["node"]),
            *device_of(each["gpus"], [*gpus[each["node"]]]),
        )
        for agent in order
        for each in [told[agent]]
    ]


def device_of(own: Sequence[str], visible: Sequence[str]) -> tuple[str, str]:
    """Returns what a process that sees these GPUs calls its own, and its UUID if it is a part of one."""
    if not own:
        return HOST, ""
    part = DEVICES[GPU].part
    return (f"{GPU}:0", own[0]) if own[0].startswith(part) else (f"{GPU}:{visible.index(own[0])}", "")


def _by_node(told: Sequence[Description], agents: range, first: str) -> list[list[int]]:
    found: dict[str, list[int]] = {first: []}
    for agent in agents:
        found.setdefault(told[agent]["node"], []).append(agent)
    return [each for each in found.values() if each]


def cluster_of(places: Sequence[RankPlace], told: Sequence[Description], workers: int, cpus: int | None) -> Cluster:
    """Returns the cluster of the ranks; with `cpus` a host has so many cores for each of its workers."""
    given = [(place.node, place.device, place.identity) for place in places[:workers]]
    shared = bool(places[0].gpus) and len(set(given)) < workers
    hosts = tuple(_hosts(places, told, workers, cpus, shared))
    return Cluster(hosts, len(places), GPU if places[0].gpus else HOST)


def _hosts(
    places: Sequence[RankPlace], told: Sequence[Description], workers: int, cpus: int | None, shared: bool
) -> Iterator[Host]:
    """Yields the nodes; where workers share GPUs, each worker's is named."""
    for name in dict.fromkeys(place.host for place in places):
        ranks = tuple(rank for rank, place in enumerate(places) if place.host == name)
        place = places[ranks[0]]
        each = told[place.agent]
        cores = cpus * max(1, sum(rank < workers for rank in ranks)) if cpus else each["cores"]
        computing = [places[rank] for rank in ranks if rank < workers and place.gpus]
        devices = tuple(each.device for each in computing)
        identities = tuple(each.identity for each in computing) if any(each.identity for each in computing) else ()
        yield Host(
            *(name, cores, each["memory_bytes"], tuple(dict.fromkeys(devices)) if shared else devices, ranks),
            *(place.address,),
            worker_devices=devices if shared else (),
            identities=identities,
            device_memory_bytes=each.get("gpu_bytes", 0),
        )
