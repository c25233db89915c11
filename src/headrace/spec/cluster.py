"""The machines and the links between them, for planning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.devices import HOST
from headrace.errors import UnknownName
from headrace.registry import imported


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        cores: that the run may use, by affinity and quota.
        memory_bytes: that is free, by the machine and by control groups.
        accelerators: devices by name, "cuda:0"; empty on a CPU machine.
        ranks: of the processes that a launcher has started on it, where there are several hosts.
        address: by which other hosts reach it; "" where it is not given.
        price_per_hour: in the cluster's currency, the same for all hosts.
        device_memory_bytes: of each accelerator, of the largest where they differ; 0 where it is not known.
        device_flops: operations a second that a device attains in training, not its peak; 0 where measured times count.
        bus_bytes_per_s: between two devices of the host, or two processes on its cores.
        speed: of its devices, relative to the one that the model was measured on.
        hours_between_failures: on average; 0 if it never fails.
        worker_devices: of each of its workers, in the order of their ranks, where the user has named them; else ().
        identities: UUIDs of `worker_devices`, or else of `accelerators`, where a name does not say which device it is:
            processes that each see a device of their own all call it "cuda:0". () where names do.
        watts: that it takes while all its devices train; 0 where it is not known.
        threads: that each of its processes may have; 0 for any number.
    """

    name: str
    cores: int
    memory_bytes: int
    accelerators: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    address: str = ""
    price_per_hour: float = 0.0
    device_memory_bytes: int = 0
    device_flops: float = 0.0
    bus_bytes_per_s: float = 5e9
    speed: float = 1.0
    hours_between_failures: float = 0.0
    worker_devices: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()
    watts: float = 0.0
    threads: int = 0


@dataclass(frozen=True)
class Link:
    """The way from one host to another; the way back is a link of its own.

    Attributes:
        bytes_per_s: of the line, headers included, while no other link is used.
        latency_s: of a small message; 0 where it is not known.
        shared: links of one name divide `bytes_per_s` among those that are used at the same time; "" for none.
    """

    source: str
    target: str
    bytes_per_s: float
    latency_s: float = 0.0
    shared: str = ""


@dataclass(frozen=True)
class Cluster:
    """The machines of a run.

    Attributes:
        hosts: in the order of their first ranks.
        ranks: number of processes that a launcher has started (torchrun's WORLD_SIZE); None without a launcher.
        device: where tensors live, a row of the device table; the first accelerator's, where each worker's is named.
        link_bytes_per_s: bandwidth between two hosts that no link names; 1 Gbit/s is an assumption.
        link_latency_s: latency between them; 0 where it is not known.
        links: between hosts, as measured or as said.
        trusted: whether accelerators may exchange between hosts by themselves, without encryption.
        rdma: whether network cards read and write the memory of accelerators (InfiniBand, RoCE, EFA).
        currency: of prices, "EUR"; "" where it is not said.

    Examples:
        >>> cluster = hr.Cluster.load("cluster.toml")
        >>> [host.name for host in cluster.hosts]
        ['gpu-0', 'gpu-1', 'gpu-2', 'gpu-3']
    """

    hosts: tuple[Host, ...]
    ranks: int | None = None
    device: str = HOST
    link_bytes_per_s: float = 125e6
    link_latency_s: float = 0.0
    links: tuple[Link, ...] = ()
    trusted: bool = False
    rdma: bool = False
    currency: str = ""

    @property
    def accelerators(self) -> int:
        """Accelerators of all hosts together."""
        return sum(len(host.accelerators) for host in self.hosts)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices that workers run on, each once."""
        named = [device.partition(":")[0] for host in self.hosts for device in host.worker_devices or (HOST,)]
        return tuple(dict.fromkeys(named)) if self.names_devices else (self.device,)

    @property
    def names_devices(self) -> bool:
        """Whether the user has named the workers' devices one by one; where a host has no names, they are CPUs."""
        return any(host.worker_devices for host in self.hosts)

    @property
    def price_per_hour(self) -> float:
        """Of all hosts together."""
        return sum(host.price_per_hour for host in self.hosts)

    def link(self, source: str, target: str) -> Link:
        """Returns the link from one host to another."""
        default = Link(source, target, self.link_bytes_per_s, self.link_latency_s)
        return next((link for link in self.links if (link.source, link.target) == (source, target)), default)

    def bandwidths(self, pairs: Sequence[tuple[str, str]]) -> tuple[float, ...]:
        """Returns the bytes/s between the hosts of each pair, in the slower direction, while all pairs are used.

        Infinite where both are one host.
        """
        ways = [[self.link(a, b), self.link(b, a)] if a != b else [] for a, b in pairs]
        users = Counter(name for way in ways for name in {link.shared for link in way})
        return tuple(
            min((link.bytes_per_s / (users[link.shared] if link.shared else 1) for link in way), default=math.inf)
            for way in ways
        )

    def with_links_of(self, known: Cluster) -> Cluster:
        """Returns this cluster with another one's links."""
        rate, latency = known.link_bytes_per_s, known.link_latency_s
        return replace(self, link_bytes_per_s=rate, link_latency_s=latency, links=known.links)

    def require(self, hosts: Sequence[Host]) -> None:
        """Raises UnknownName for a host of a run that this cluster does not have."""
        for host in hosts:
            if host.name not in {host.name for host in self.hosts}:
                raise UnknownName("host", host.name, (each.name for each in self.hosts), "the given cluster")

    @staticmethod
    def load(path: Path | str) -> Cluster:
        """Reads a file like docs/guide/several-hosts.md's.

        Raises:
            UsageError: the file cannot be read, has a key or a value that it must not have, two hosts of one name, or
                links that contradict each other; with the file and the key.
        """
        cluster: Cluster = imported("headrace.spec.files.clusters:read")(path)
        return cluster

    def toml(self) -> str:
        """Returns the text that `load` reads."""
        written: str = imported("headrace.spec.files.clusters:text_of")(self)
        return written
