"""Clusters of machines that can be rented, by name: `aws-g5.xlarge:4`. Prices and figures are in cloud.toml."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path

from headrace.devices import GPU, HOST
from headrace.errors import UnknownName, UsageError
from headrace.machine import disk
from headrace.spec.cluster import Cluster, Host

_NAME = re.compile(r"(?P<cloud>aws)-(?P<machine>[\w.-]+?)(?::(?P<count>[1-9]\d*))?")


@dataclass(frozen=True)
class CloudMachine:
    """A machine that can be rented.

    Attributes:
        device: the accelerator's name; "" for none.
        bytes_per_s: of its network card, at all times.
    """

    name: str
    host: Host
    device: str
    bytes_per_s: float


@cache
def cloud_machines() -> Mapping[str, CloudMachine]:
    """Returns the machines by name."""
    text = resources.files("headrace.prediction").joinpath("cloud.toml").read_text(encoding="utf-8")
    return {
        name: _machine(name, figures)
        for cloud, about in tomllib.loads(text).items()
        for name, figures in ((f"{cloud}-{kind}", figures) for kind, figures in about["machines"].items())
    }


def _machine(name: str, figures: Mapping[str, float | str]) -> CloudMachine:
    def number(key: str, default: float = 0.0) -> float:
        return float(figures.get(key, default))

    host = Host(
        name,
        cores=int(number("cores")),
        memory_bytes=round(number("memory_gb") * 1e9),
        accelerators=tuple(f"{GPU}:{index}" for index in range(int(number("accelerators")))),
        price_per_hour=number("price_per_hour"),
        device_memory_bytes=round(number("device_memory_gb") * 1e9),
        bus_bytes_per_s=number("bus_gb_per_s", Host.bus_bytes_per_s / 1e9) * 1e9,
    )
    return CloudMachine(name, host, str(figures.get("device", "")), number("mbit_per_s") * 1e6 / 8)


def cloud_cluster(name: str, count: int = 1) -> Cluster:
    """Returns so many machines of one kind; raises UnknownName."""
    known = cloud_machines()
    if name not in known:
        raise UnknownName("machine", name, known, "the clouds' list")
    machine = known[name]
    hosts = tuple(replace(machine.host, name=f"{name}-{index}") for index in range(count))
    device = GPU if machine.device else HOST
    return Cluster(hosts, device=device, link_bytes_per_s=machine.bytes_per_s)


def cluster_of(given: Cluster | Path | str) -> Cluster:
    """Returns a cluster, the one of a file, or one of rented machines: "aws-g5.xlarge:4".

    Raises:
        UnknownName: there is no such machine, nor a file of that name.
        UsageError: the file cannot be read; or the cluster has no host, or two of one name, which count as one.
    """
    if isinstance(given, Cluster):
        names = Counter(host.name for host in given.hosts)
        twice = [name for name, count in names.items() if count > 1]
        if twice or not names:
            raise UsageError(
                f"the cluster has two hosts of one name, {twice[0]!r}" if twice else "the cluster has no host"
            )
        return given
    named = _NAME.fullmatch(str(given))
    if named is None or disk.exists(Path(given)):
        return Cluster.load(given)
    return cloud_cluster(f"{named['cloud']}-{named['machine']}", int(named["count"] or 1))
