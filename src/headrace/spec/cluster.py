"""The machines and the links between them, for planning; their file, `cluster.toml`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.devices import GPU, HOST, check_name
from headrace.errors import UnknownName, UsageError
from headrace.spec.tables import check_keys, number, read_toml, tables, text, whole


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        cores: that the run may use, by affinity and quota.
        memory_bytes: that is free, by the machine and by control groups.
        accelerators: devices by name, "cuda:0"; empty on a CPU machine.
        ranks: of the processes that a launcher has started on it, where there are several hosts.
        address: by which other hosts reach it; "" where it is not given.
        price_per_hour: in any currency, the same for all hosts.
        device_memory_bytes: of each accelerator; 0 where it is not known.
        device_flops: floating-point operations a second that a device attains in training, not its peak; 0 where it is
            not known, and a model's measured times count.
        bus_bytes_per_s: between two devices of the host, or two processes on its cores.
        speed: of its devices, relative to the one that the model was measured on.
        hours_between_failures: on average; 0 if it never fails.
        worker_devices: of each of its workers, in the order of their ranks, where the user has named them; else ().
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


@dataclass(frozen=True)
class Link:
    """The way from one host to another; the way back is a link of its own.

    Attributes:
        bytes_per_s: of the line, headers included, while no other link is used.
        latency_s: of a small message.
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
        device: where tensors live, a row of the device table; the first accelerator's, where workers' devices are named
            one by one.
        link_bytes_per_s: bandwidth between two hosts that no link names; 1 Gbit/s is an assumption.
        link_latency_s: latency between them.
        links: between hosts, as measured or as said.

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
            if host.name not in {each.name for each in self.hosts}:
                raise UnknownName("host", host.name, (each.name for each in self.hosts), "the given cluster")

    @staticmethod
    def load(path: Path | str) -> Cluster:
        """Reads a file like docs/guide/several-hosts.md's.

        Raises:
            UsageError: the file cannot be read, has a key or a value that it must not have, two hosts of one name, or
                links that contradict each other; with the file and the key.
        """
        document = read_toml(path, "a cluster's file")
        try:
            return _cluster(document)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    def toml(self) -> str:
        """Returns the text that `load` reads."""
        lines = [f"device = {_text(self.device)}"]
        if (self.link_bytes_per_s, self.link_latency_s) != (Cluster.link_bytes_per_s, Cluster.link_latency_s):
            lines += ["", "[network]", *_rates(self.link_bytes_per_s, self.link_latency_s)]
        for host in self.hosts:
            lines += ["", "[[hosts]]", f"name = {_text(host.name)}"]
            lines += [f"address = {_text(host.address)}"] * bool(host.address)
            lines += [f"cores = {host.cores}", f"memory_gb = {_number(host.memory_bytes / 1e9)}"]
            lines += [f"accelerators = {_text(host.accelerators)}"] * bool(host.accelerators)
            lines += [f"price_per_hour = {_number(host.price_per_hour)}"] * bool(host.price_per_hour)
            lines += _device(host)
        for link in self.links:
            lines += ["", "[[links]]", f"from = {_text(link.source)}", f"to = {_text(link.target)}"]
            lines += _rates(link.bytes_per_s, link.latency_s)
            lines += [f"shared = {_text(link.shared)}"] * bool(link.shared)
        return "\n".join(lines) + "\n"


def _device(host: Host) -> list[str]:
    """Returns the lines of a host's devices that do not say the defaults."""
    figures = {
        "device_memory_gb": (host.device_memory_bytes / 1e9, Host.device_memory_bytes),
        "device_tflops": (host.device_flops / 1e12, Host.device_flops),
        "bus_gb_per_s": (host.bus_bytes_per_s / 1e9, Host.bus_bytes_per_s / 1e9),
        "speed": (host.speed, Host.speed),
        "hours_between_failures": (host.hours_between_failures, Host.hours_between_failures),
    }
    return [f"{key} = {_number(value)}" for key, (value, default) in figures.items() if value != default]


def _rates(bytes_per_s: float, latency_s: float) -> list[str]:
    return [f"mbit_per_s = {_number(bytes_per_s * 8 / 1e6)}", f"latency_ms = {_number(latency_s * 1e3)}"]


def _text(value: str | Sequence[str]) -> str:
    """Returns a text, or a list of texts, in quotes. TOML has no surrogates, and no DEL that is not escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(value: float) -> str:
    return f"{value:.6g}" if value < 1e6 else f"{value:.0f}"


_TOP = ("device", "network", "hosts", "links")
_HOST = (
    *("name", "count", "address", "cores", "memory_gb", "accelerators", "price_per_hour", "device_memory_gb"),
    *("device_tflops", "bus_gb_per_s", "speed", "hours_between_failures"),
)
_RATES = ("mbit_per_s", "latency_ms")
_LINK = ("between", "from", "to", *_RATES, "shared")
# Far above what there is: 100 Tbit/s of a network, 10 s of latency, 100 TB of memory, 1 EFLOP/s and 100 TB/s in a host.
_MOST_MBIT, _MOST_MS, _MOST_GB, _MOST_TFLOPS, _MOST_BUS_GB = 1e8, 1e4, 1e5, 1e6, 1e5
# More would be a slip of the hand, and fill the memory.
_MOST_HOSTS, _MOST_ACCELERATORS = 100_000, 1024
# Far below: 10 kbit/s of a network, 10 MB of memory, 100 MFLOP/s, 10 MB/s and a failure every 4 s in a host.
_LEAST_MBIT, _LEAST_GB, _LEAST_TFLOPS, _LEAST_BUS_GB, _LEAST_HOURS = 0.01, 0.01, 1e-4, 0.01, 1e-3


def _cluster(document: Mapping[str, Any]) -> Cluster:
    check_keys(document, _TOP, "the file")
    device = text(document, "device", "", HOST)
    check_name(device)
    items = tables(document, "hosts")
    places = [(place, host) for place, item in enumerate(items) for host in _hosts(item, f"hosts[{place}]", device)]
    if not places:
        raise UsageError("no hosts; a host begins with [[hosts]] and has a name, cores and memory_gb")
    first: dict[str, int] = {}
    for place, host in places:
        if first.setdefault(host.name, place) != place:
            raise UsageError(f"hosts[{first[host.name]}] and hosts[{place}] have one name, {host.name!r}")
    hosts = tuple(host for _, host in places)
    links = _links(document, [host.name for host in hosts])
    if "network" not in document:
        return Cluster(hosts, device=device, links=links)
    network = document["network"]
    if not isinstance(network, dict):
        raise UsageError("network must be a table, [network]")
    check_keys(network, _RATES, "network")
    return Cluster(hosts, None, device, *_rate_and_latency(network, "network"), links=links)


def _hosts(item: Mapping[str, Any], where: str, device: str) -> list[Host]:
    """Returns the host of a table, or as many like it as its `count` says, "a-0", "a-1" and so on."""
    check_keys(item, _HOST, where)
    name = text(item, "name", where)
    host = Host(
        name,
        cores=whole(item, "cores", where),
        memory_bytes=round(number(item, "memory_gb", where, least=_LEAST_GB, most=_MOST_GB) * 1e9),
        accelerators=_accelerators(item, where, GPU if device == HOST else device),
        address=text(item, "address", where, ""),
        price_per_hour=number(item, "price_per_hour", where, 0.0),
        device_memory_bytes=round(number(item, "device_memory_gb", where, 0.0, least=_LEAST_GB, most=_MOST_GB) * 1e9),
        device_flops=number(item, "device_tflops", where, 0.0, least=_LEAST_TFLOPS, most=_MOST_TFLOPS) * 1e12,
        bus_bytes_per_s=number(
            item, "bus_gb_per_s", where, Host.bus_bytes_per_s / 1e9, least=_LEAST_BUS_GB, most=_MOST_BUS_GB
        )
        * 1e9,
        speed=number(item, "speed", where, 1.0),
        hours_between_failures=number(item, "hours_between_failures", where, 0.0, least=_LEAST_HOURS),
    )
    for key, value in (("bus_gb_per_s", host.bus_bytes_per_s), ("speed", host.speed)):
        if value == 0:
            raise UsageError(f"{where}.{key} must be above 0")
    if "count" not in item:
        return [host]
    return [replace(host, name=f"{name}-{index}") for index in range(whole(item, "count", where, most=_MOST_HOSTS))]


def _accelerators(item: Mapping[str, Any], where: str, kind: str) -> tuple[str, ...]:
    """Returns the devices by name; a number of them stands for "cuda:0" and so on, of the kind."""
    devices = item.get("accelerators", [])
    if isinstance(devices, int) and not isinstance(devices, bool) and devices >= 0:
        if devices > _MOST_ACCELERATORS:
            raise UsageError(f"{where}.accelerators is {devices}, and no host has more than {_MOST_ACCELERATORS}")
        return tuple(f"{kind}:{index}" for index in range(devices))
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise UsageError(f'{where}.accelerators must be a number, or a list like ["{kind}:0"], got {devices!r}')
    return tuple(devices)


def _links(document: Mapping[str, Any], names: Sequence[str]) -> tuple[Link, ...]:
    found: dict[tuple[str, str], str] = {}
    links = []
    for place, item in enumerate(tables(document, "links")):
        where = f"links[{place}]"
        check_keys(item, _LINK, where)
        for ends in _ends(item, where, names):
            if ends in found:
                raise UsageError(f"{where} and {found[ends]} both say what is from {ends[0]!r} to {ends[1]!r}")
            found[ends] = where
            links.append(Link(*ends, *_rate_and_latency(item, where), text(item, "shared", where, "")))
    return tuple(links)


def _ends(item: Mapping[str, Any], where: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the (source, target) of each direction that a link has."""
    both = item.get("between")
    if ("between" in item) == ("from" in item and "to" in item) or ("from" in item) != ("to" in item):
        raise UsageError(f'{where} needs either between = ["a", "b"], or both from = "a" and to = "b"')
    ends = both if "between" in item else [item["from"], item["to"]]
    if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(name, str) for name in ends):
        raise UsageError(f"{where} must name two hosts, got {ends!r}")
    for name in ends:
        if name not in names:
            raise UnknownName("host", name, names, where)
    one, other = ends
    if one == other:
        raise UsageError(f"{where} is from {one!r} to itself")
    return [(one, other), (other, one)] if "between" in item else [(one, other)]


def _rate_and_latency(item: Mapping[str, Any], where: str) -> tuple[float, float]:
    rate = number(item, "mbit_per_s", where, least=_LEAST_MBIT, most=_MOST_MBIT)
    if rate == 0:
        raise UsageError(f"{where}.mbit_per_s must be above 0")
    return rate * 1e6 / 8, number(item, "latency_ms", where, 0.0, most=_MOST_MS) / 1e3
