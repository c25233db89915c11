"""The file of a cluster, `cluster.toml`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.devices import GPU, HOST, check_name
from headrace.errors import UnknownName, UsageError
from headrace.spec.cluster import Cluster, Host, Link
from headrace.spec.files.tables import check_keys, flag, number, read_toml, tables, text, whole


def read(path: Path | str) -> Cluster:
    """See `Cluster.load`."""
    document = read_toml(path, "a cluster's file")
    try:
        return _cluster(document)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def text_of(cluster: Cluster) -> str:
    """Returns the text that `read` reads."""
    lines = [f"device = {_text(cluster.device)}"]
    lines += [f"currency = {_text(cluster.currency)}"] * bool(cluster.currency)
    rates = cluster.link_bytes_per_s, cluster.link_latency_s
    if rates != (Cluster.link_bytes_per_s, Cluster.link_latency_s) or cluster.rdma:
        lines += ["", "[network]", *_rates(*rates), *["rdma = true"] * cluster.rdma]
    for host in cluster.hosts:
        lines += ["", "[[hosts]]", f"name = {_text(host.name)}"]
        lines += [f"address = {_text(host.address)}"] * bool(host.address)
        lines += [f"cores = {host.cores}", f"memory_gb = {_number(host.memory_bytes / 1e9)}"]
        lines += [f"accelerators = {_text(host.accelerators)}"] * bool(host.accelerators)
        lines += [f"price_per_hour = {_number(host.price_per_hour)}"] * bool(host.price_per_hour)
        figures = {
            "device_memory_gb": (host.device_memory_bytes / 1e9, Host.device_memory_bytes),
            "device_tflops": (host.device_flops / 1e12, Host.device_flops),
            "bus_gb_per_s": (host.bus_bytes_per_s / 1e9, Host.bus_bytes_per_s / 1e9),
            "speed": (host.speed, Host.speed),
            "hours_between_failures": (host.hours_between_failures, Host.hours_between_failures),
            "watts": (host.watts, Host.watts),
        }
        lines += [f"{key} = {_number(value)}" for key, (value, default) in figures.items() if value != default]
    for link in cluster.links:
        lines += ["", "[[links]]", f"from = {_text(link.source)}", f"to = {_text(link.target)}"]
        lines += _rates(link.bytes_per_s, link.latency_s)
        lines += [f"shared = {_text(link.shared)}"] * bool(link.shared)
    return "\n".join(lines) + "\n"


def _rates(bytes_per_s: float, latency_s: float) -> list[str]:
    return [f"mbit_per_s = {_number(bytes_per_s * 8 / 1e6)}", f"latency_ms = {_number(latency_s * 1e3)}"]


def _text(value: str | Sequence[str]) -> str:
    """Returns a text, or a list of texts, in quotes. TOML has no surrogates, and no DEL that is not escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(value: float) -> str:
    return f"{value:.6g}" if value < 1e6 else f"{value:.0f}"


_TOP = ("device", "currency", "network", "hosts", "links")
_HOST = (
    *("name", "count", "address", "cores", "memory_gb", "accelerators", "price_per_hour", "device_memory_gb"),
    *("device_tflops", "bus_gb_per_s", "speed", "hours_between_failures", "watts"),
)
_RATES = ("mbit_per_s", "latency_ms")
_LINK = ("between", "from", "to", *_RATES, "shared")
# Far above what there is: 100 Tbit/s of a network, 10 s of latency, 100 TB of memory, 1 EFLOP/s and 100 TB/s in a host.
_MOST_MBIT, _MOST_MS, _MOST_GB, _MOST_TFLOPS, _MOST_BUS_GB = 1e8, 1e4, 1e5, 1e6, 1e5
# More would be a slip of the hand, and fill the memory.
_MOST_HOSTS, _MOST_ACCELERATORS, _MOST_WATTS = 100_000, 1024, 1e6
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
    currency = text(document, "currency", "", "")
    if "network" not in document:
        return Cluster(hosts, device=device, links=links, currency=currency)
    network = document["network"]
    if not isinstance(network, dict):
        raise UsageError("network must be a table, [network]")
    check_keys(network, (*_RATES, "rdma"), "network")
    rdma = flag(network, "rdma", "network")
    rates = _rate_and_latency(network, "network")
    return Cluster(hosts, None, device, *rates, links=links, rdma=rdma, currency=currency)


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
        watts=number(item, "watts", where, 0.0, most=_MOST_WATTS),
    )
    figures = {"bus_gb_per_s": host.bus_bytes_per_s, "speed": host.speed, "watts": host.watts}
    for key, value in figures.items():
        if value == 0 and (key in item or key != "watts"):
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
    places: dict[tuple[str, str], str] = {}
    links = []
    for place, item in enumerate(tables(document, "links")):
        where = f"links[{place}]"
        check_keys(item, _LINK, where)
        for ends in _ends(item, where, names):
            if ends in places:
                raise UsageError(f"{where} and {places[ends]} both say what is from {ends[0]!r} to {ends[1]!r}")
            places[ends] = where
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
