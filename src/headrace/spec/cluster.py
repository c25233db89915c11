"""The machines and the links between them, for planning; their file, `cluster.toml`."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from headrace.errors import UnknownName, UsageError


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
    """

    name: str
    cores: int
    memory_bytes: int
    accelerators: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    address: str = ""
    price_per_hour: float = 0.0


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
        device: where tensors live, "cpu" or "cuda".
        link_bytes_per_s: bandwidth between two hosts that no link names; 1 Gbit/s is an assumption.
        link_latency_s: latency between them.
        links: between hosts, as measured or as said.
    """

    hosts: tuple[Host, ...]
    ranks: int | None = None
    device: str = "cpu"
    link_bytes_per_s: float = 125e6
    link_latency_s: float = 0.0
    links: tuple[Link, ...] = ()

    @property
    def accelerators(self) -> int:
        """Accelerators of all hosts together."""
        return sum(len(host.accelerators) for host in self.hosts)

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
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path} cannot be read as a cluster's file: {error}") from None
        try:
            return _cluster(document)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    def toml(self) -> str:
        """Returns the text that `load` reads."""
        lines = [f"device = {json.dumps(self.device)}"]
        if (self.link_bytes_per_s, self.link_latency_s) != (Cluster.link_bytes_per_s, Cluster.link_latency_s):
            lines += ["", "[network]", *_rates(self.link_bytes_per_s, self.link_latency_s)]
        for host in self.hosts:
            lines += ["", "[[hosts]]", f"name = {json.dumps(host.name)}"]
            lines += [f"address = {json.dumps(host.address)}"] * bool(host.address)
            lines += [f"cores = {host.cores}", f"memory_gb = {_number(host.memory_bytes / 1e9)}"]
            lines += [f"accelerators = {json.dumps(host.accelerators)}"] * bool(host.accelerators)
            lines += [f"price_per_hour = {_number(host.price_per_hour)}"] * bool(host.price_per_hour)
        for link in self.links:
            lines += ["", "[[links]]", f"from = {json.dumps(link.source)}", f"to = {json.dumps(link.target)}"]
            lines += _rates(link.bytes_per_s, link.latency_s)
            lines += [f"shared = {json.dumps(link.shared)}"] * bool(link.shared)
        return "\n".join(lines) + "\n"


def _rates(bytes_per_s: float, latency_s: float) -> list[str]:
    return [f"mbit_per_s = {_number(bytes_per_s * 8 / 1e6)}", f"latency_ms = {_number(latency_s * 1e3)}"]


def _number(value: float) -> str:
    return f"{value:.6g}" if value < 1e6 else f"{value:.0f}"


_TOP = ("device", "network", "hosts", "links")
_HOST = ("name", "address", "cores", "memory_gb", "accelerators", "price_per_hour")
_RATES = ("mbit_per_s", "latency_ms")
_LINK = ("between", "from", "to", *_RATES, "shared")


def _cluster(document: Mapping[str, Any]) -> Cluster:
    _known(document, _TOP, "the file")
    device = _text(document, "device", "", "cpu")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device is 'cpu' or 'cuda', got {device!r}")
    hosts = tuple(_host(item, f"hosts[{place}]") for place, item in enumerate(_tables(document, "hosts")))
    if not hosts:
        raise UsageError("no hosts; a host begins with [[hosts]] and has a name, cores and memory_gb")
    for first, second in combinations(range(len(hosts)), 2):
        if hosts[first].name == hosts[second].name:
            raise UsageError(f"hosts[{first}] and hosts[{second}] have one name, {hosts[first].name!r}")
    links = _links(document, [host.name for host in hosts])
    if "network" not in document:
        return Cluster(hosts, device=device, links=links)
    network = document["network"]
    if not isinstance(network, dict):
        raise UsageError("network must be a table, [network]")
    _known(network, _RATES, "network")
    return Cluster(hosts, None, device, *_rate_and_latency(network, "network"), links=links)


def _host(item: Mapping[str, Any], where: str) -> Host:
    _known(item, _HOST, where)
    cores = item.get("cores")
    if not isinstance(cores, int) or isinstance(cores, bool) or cores < 1:
        raise UsageError(f"{where}.cores must be a whole number of at least 1, got {cores!r}")
    memory = _number_of(item, "memory_gb", where, least=0.0)
    devices = item.get("accelerators", [])
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise UsageError(f'{where}.accelerators must be a list like ["cuda:0"], got {devices!r}')
    price = _number_of(item, "price_per_hour", where, 0.0, least=0.0)
    name = _text(item, "name", where)
    return Host(name, cores, round(memory * 1e9), tuple(devices), (), _text(item, "address", where, ""), price)


def _links(document: Mapping[str, Any], names: Sequence[str]) -> tuple[Link, ...]:
    found: dict[tuple[str, str], str] = {}
    links = []
    for place, item in enumerate(_tables(document, "links")):
        where = f"links[{place}]"
        _known(item, _LINK, where)
        for ends in _ends(item, where, names):
            if ends in found:
                raise UsageError(f"{where} and {found[ends]} both say what is from {ends[0]!r} to {ends[1]!r}")
            found[ends] = where
            links.append(Link(*ends, *_rate_and_latency(item, where), _text(item, "shared", where, "")))
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
    rate = _number_of(item, "mbit_per_s", where, least=0.0)
    if rate == 0:
        raise UsageError(f"{where}.mbit_per_s must be above 0")
    return rate * 1e6 / 8, _number_of(item, "latency_ms", where, 0.0, least=0.0) / 1e3


def _known(item: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in item:
        if key not in keys:
            raise UnknownName("key", key, keys, where)


def _tables(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    items = document.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UsageError(f"{key} must be tables, [[{key}]]")
    return items


def _text(item: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = item.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise UsageError(f"{where}.{key} must be a text, got {value!r}".lstrip("."))
    return value


def _number_of(item: Mapping[str, Any], key: str, where: str, default: float | None = None, *, least: float) -> float:
    value = item.get(key, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and value >= least):
        raise UsageError(f"{where}.{key} must be a number of at least {least:g}, got {value!r}")
    return float(value)
