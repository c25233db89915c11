"""`headrace doctor` on several hosts: what each has, whether all have the same, and what the links carry."""

from __future__ import annotations

import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from headrace.cli.jobfile import load_job
from headrace.cli.verdict import Check, ok, problem, warning
from headrace.devices import HOST, kind_of
from headrace.errors import HeadraceError, UsageError
from headrace.machine import disk
from headrace.machine.accelerators import backend_version, device_title
from headrace.report.format import byte_count
from headrace.spec.cluster import Cluster, Link

if TYPE_CHECKING:
    from headrace.engine.network.survey import HostFacts, LinkFacts, Survey

_LITTLE_SHARED_MEMORY = 256 << 20
_CLOCK_S = 0.1
_SLOW = 0.7
"""Of what is usual."""
_MISSING = "nothing"
ACCELERATORS = "accelerators"
SPEED = "give each what it does in the same time, Mirrored(balance='speed'); equal shares wait for the slowest"
"""The remedy for devices of different kinds."""
_LESS = 0.8
"""Of what the cluster's file says."""


def own_facts(path: Path | None, settings: Sequence[str]) -> HostFacts:
    """Returns what this host is, and the digests of a job file and of its data."""
    # Lazily: they import torch.
    from headrace.engine.network.survey import HostFacts
    from headrace.machine.identity import detect, versions

    facts = dict(versions())
    cluster = detect("auto")
    if cluster.device != HOST:
        kind = kind_of(cluster.device)
        facts[kind.backend] = backend_version(kind) or f"{_MISSING}: torch is built without it"
        facts[ACCELERATORS] = listed(cluster.hosts[0].accelerators)
    if path is not None:
        from headrace.data.datasets import digest_of

        facts["job file"] = digest_of(path) if disk.is_file(path) else f"{_MISSING}: {path} is not there"
        facts["data"] = _data(path, settings)
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if disk.is_folder(folder) else 0
    return HostFacts(cluster.hosts[0], facts, free)


def listed(devices: Sequence[str]) -> str:
    """Returns what devices are, with their memory, each once: "8 x NVIDIA H100 80GB HBM3, 85 GB"."""
    counts = Counter(map(device_title, devices))
    return "; ".join(f"{count} x {title}" for title, count in counts.items())


def _data(path: Path, settings: Sequence[str]) -> str:
    from headrace.data.cache.fingerprint import fingerprint
    from headrace.data.given import as_pipeline

    # An error here alone would leave the other hosts waiting.
    try:
        data = load_job(path, settings).data
    except HeadraceError as error:
        return f"{_MISSING}: {error}"
    if as_pipeline(data)[0].hosts is not None:
        return "each host has its own"
    try:
        return fingerprint(data)
    except UsageError as error:
        return f"not compared: {error}"


def checks_of(survey: Survey, said: Cluster | None) -> list[Check]:
    """Returns what is wrong, and what was measured; `said` is what a file says of the cluster."""
    return [
        *_hosts(survey.hosts),
        *_different(survey.hosts),
        *_links(survey),
        *_clocks(survey.links),
        *(_contradictions(survey, said) if said else ()),
    ]


def measured(survey: Survey, said: Cluster | None) -> Cluster:
    """Returns the survey's cluster, with the prices of a file."""
    cluster = survey.cluster()
    prices = {host.name: host.price_per_hour for host in said.hosts} if said else {}
    hosts = tuple(replace(host, price_per_hour=prices.get(host.name, 0.0)) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def _hosts(hosts: Sequence[HostFacts]) -> Iterator[Check]:
    for report in hosts:
        host, free = report.host, report.shared_memory_bytes
        devices = f", {len(host.accelerators)} accelerators" if host.accelerators else ""
        text = f"{host.name} at {host.address}: {host.cores} cores, {byte_count(host.memory_bytes)} free{devices}"
        yield ok("host", f"{text}, {byte_count(free)} of shared memory")
        if report.interface:
            yield warning("interface", report.interface, "let both connect by one network, or know why not")
        if free < _LITTLE_SHARED_MEMORY:
            yield warning("host", f"{host.name} has {byte_count(free)} free in /dev/shm", "docker run --shm-size=2g")


def _different(hosts: Sequence[HostFacts]) -> Iterator[Check]:
    for key in dict.fromkeys(key for report in hosts for key in report.facts):
        values = {report.host.name: report.facts.get(key, _MISSING) for report in hosts}
        (usual, count), *others = Counter(values.values()).most_common()
        if not others:
            yield ok(key, usual) if not usual.startswith(_MISSING) else problem(key, usual, "correct it on all hosts")
            continue
        apart = {name: value for name, value in values.items() if value != usual or count * 2 <= len(values)}
        differing = ", ".join(f"{name} has {value}" for name, value in apart.items())
        rest = f"; the others have {usual}" if len(apart) < len(values) else ""
        if key == ACCELERATORS:
            yield warning(key, f"not the same on all hosts: {differing}{rest}", SPEED)
            continue
        yield problem(key, f"not the same on all hosts: {differing}{rest}", f"give all hosts the same {key}")


def _links(survey: Survey) -> Iterator[Check]:
    broken = {(link.source, link.target): link.error for link in survey.links if link.error}
    for (source, target), error in broken.items():
        back = "nor the other way" if (target, source) in broken else f"from {target} to {source} it works"
        yield problem(
            "link",
            f"{source} does not reach {target} ({error}); {back}",
            "a firewall between them? open all ports between the hosts of a run, in both directions",
        )
    cluster = survey.cluster()
    if not cluster.links:
        return
    rates = [link.bytes_per_s for link in cluster.links]
    late = [link.latency_s for link in cluster.links]
    text = f"{_mbit(min(rates))} to {_mbit(max(rates))}, {_ms(min(late))} to {_ms(max(late))}"
    yield ok("links", f"{len(rates)} directions: {text}")
    yield from _slow(cluster)
    shared = [link for link in cluster.links if link.shared]
    if shared:
        ends = ", ".join(sorted({" - ".join(sorted((link.source, link.target))) for link in shared}))
        text = f"{ends} share a switch: {_mbit(max(link.bytes_per_s for link in shared))} alone, less together"
        yield warning("shared", text, "place what exchanges most on one side of it; plans count it by --cluster")


def _slow(cluster: Cluster) -> Iterator[Check]:
    names = [host.name for host in cluster.hosts]
    # What a switch limits says nothing of a host, nor does a slow sender of those that receive.
    links = [link for link in cluster.links if not link.shared]
    sends = {name: _best(link for link in links if link.source == name) for name in names}
    slow, usual = _below(sends)
    for name in slow:
        yield warning("slow", f"{name} sends at most {_mbit(sends[name])}, others {_mbit(usual)}", "check its network")
    links = [link for link in links if link.source not in slow]
    receives = {name: _best(link for link in links if link.target == name) for name in names}
    late, usual = _below(receives)
    for name in late:
        text = f"{name} receives at most {_mbit(receives[name])}, others {_mbit(usual)}"
        yield warning("slow", text, "check its network")
    for link in links:
        usual = min(sends[link.source], receives[link.target])
        if link.bytes_per_s < _SLOW * usual:
            text = f"from {link.source} to {link.target} {_mbit(link.bytes_per_s)}, elsewhere they have {_mbit(usual)}"
            yield warning("slow", text, "check the way between them")


def _below(rates: Mapping[str, float]) -> tuple[list[str], float]:
    """Returns the names whose rate is far below the median, and the median; a rate of 0 is not known."""
    usual = median([rate for rate in rates.values() if rate] or [0.0])
    return [name for name, rate in rates.items() if 0 < rate < _SLOW * usual], usual


def _best(links: Iterable[Link]) -> float:
    return max((link.bytes_per_s for link in links), default=0.0)


def _clocks(links: Sequence[LinkFacts]) -> Iterator[Check]:
    first = links[0].source
    ahead = {link.target: link.ahead_s for link in links if link.source == first and not link.error}
    for name, seconds in ahead.items():
        if abs(seconds) > _CLOCK_S:
            text = f"{name} is {abs(seconds):.3g} s {'ahead of' if seconds > 0 else 'behind'} {first}"
            yield warning("clock", text, "events of hosts are ordered by their clocks; run an NTP client")
    if ahead:
        yield ok("clocks", f"within {_ms(max(abs(seconds) for seconds in ahead.values()))} of {first}'s")


def _contradictions(survey: Survey, said: Cluster) -> Iterator[Check]:
    surveyed = {report.host.name: report.host for report in survey.hosts}
    for name in surveyed.keys() - {host.name for host in said.hosts}:
        yield problem("file", f"{name} is not in the cluster's file", "add it, or set HEADRACE_HOST to its name there")
    for host in said.hosts:
        if host.name not in surveyed:
            yield problem("file", f"no process runs on {host.name}", "start one there, or take it out of the file")
        elif surveyed[host.name].cores < host.cores:
            cores = f"{host.name} has {surveyed[host.name].cores} cores, the file says {host.cores}"
            yield warning("file", cores, "correct it")
        try:
            socket.getaddrinfo(host.address or None, 0)
        except OSError as error:
            yield problem("file", f"{host.name}'s address {host.address!r} does not resolve: {error}", "correct it")
    if not said.links and said.link_bytes_per_s == Cluster.link_bytes_per_s:
        return
    for link in survey.cluster().links:
        stated = said.link(link.source, link.target)
        if link.bytes_per_s < _LESS * stated.bytes_per_s:
            what = f"{_mbit(link.bytes_per_s)}, the file says {_mbit(stated.bytes_per_s)}"
            yield warning("file", f"from {link.source} to {link.target}: {what}", "plan with the measured file")


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:.4g} Mbit/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
