"""How long bytes are on their way: from host to host, and round an all-reduce.

What a collective takes is `latency_s + bytes * s_per_byte`. With n ranks, a bandwidth of B and a latency of a:

    ring              2 (n - 1) a           2 (n - 1) / n / B
    tree              2 ceil(log2 n) a      2 ceil(log2 n) / B
    halving_doubling  2 ceil(log2 n) a      2 (n - 1) / n / B      (Rabenseifner; once more unless n is a power of 2)
    hierarchical      inside each host, then a ring of the hosts, then inside each host again

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.spec.cluster import Cluster, Host


@dataclass(frozen=True)
class Way:
    """What bytes take: `latency_s` once, and `s_per_byte` each; `moved` times of them a rank sends."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0
    moved: float = 0.0

    def seconds(self, size: float) -> float:
        """Returns how long so many bytes take."""
        return self.latency_s + size * self.s_per_byte if size else 0.0

    def then(self, other: Way) -> Way:
        """Returns this way and another behind it."""
        return Way(self.latency_s + other.latency_s, self.s_per_byte + other.s_per_byte, self.moved + other.moved)


def ring(ranks: int, one: Way) -> Way:
    """Returns an all-reduce in a ring, given the way between two ranks."""
    return Way(2 * (ranks - 1) * one.latency_s, 2 * (ranks - 1) / ranks * one.s_per_byte, 2 * (ranks - 1) / ranks)


def tree(ranks: int, one: Way) -> Way:
    """Returns a reduction to one rank and a broadcast from it, along binary trees."""
    levels = 2 * math.ceil(math.log2(ranks))
    return Way(levels * one.latency_s, levels * one.s_per_byte, 2.0)


def halving_doubling(ranks: int, one: Way) -> Way:
    """Returns an all-reduce by recursive halving and doubling."""
    levels = math.floor(math.log2(ranks))
    inner = 1 << levels
    factor = 2 * (inner - 1) / inner
    # Ranks beyond a power of 2 give theirs to another one, and get the result from it.
    extra = 2 * (inner != ranks)
    return Way((2 * levels + extra) * one.latency_s, (factor + extra) * one.s_per_byte, factor + extra)


ALGORITHMS: Mapping[str, str] = {
    "ring": "all ranks in one ring",
    "tree": "to one rank and back along a tree",
    "halving_doubling": "recursive halving and doubling",
    "hierarchical": "inside hosts, then a ring of hosts",
}
"""All-reduce algorithms by name, with what they do."""

_FLAT = {"ring": ring, "tree": tree, "halving_doubling": halving_doubling}


class Network:
    """The links of a cluster, of whose bytes/s gradients attain a share."""

    def __init__(self, cluster: Cluster, share: float = 1.0) -> None:
        self._cluster = cluster
        self._share = share

    def between(self, source: Host, target: Host) -> Way:
        """Returns the way from a process on one host to one on another, or on the same."""
        if source.name == target.name:
            return Way(0.0, 1 / source.bus_bytes_per_s, 1.0)
        link = self._cluster.link(source.name, target.name)
        return Way(link.latency_s, 1 / (link.bytes_per_s * self._share), 1.0)

    def slowest(self, pairs: Sequence[tuple[Host, Host]]) -> Way:
        """Returns the slowest of the ways between the hosts of each pair."""
        inside = [1 / one.bus_bytes_per_s for one, other in pairs if one.name == other.name]
        across = [pair for pair in pairs if pair[0].name != pair[1].name]
        # Without links all ways from host to host are the same.
        ways = [self.between(*pair) for pair in (across if self._cluster.links else across[:1])]
        latency_s = max((way.latency_s for way in ways), default=0.0)
        return Way(latency_s, max(inside + [way.s_per_byte for way in ways]), 1.0)

    def card(self, host: Host) -> float:
        """Returns the bytes/s of a host's network card: of its fastest link, also of those that no link names."""
        own = [link for link in self._cluster.links if host.name in (link.source, link.target)]
        rates = [link.bytes_per_s for link in own]
        if len({link.target for link in own if link.source == host.name}) < len(self._cluster.hosts) - 1:
            rates.append(self._cluster.link_bytes_per_s)
        return max(rates, default=self._cluster.link_bytes_per_s) * self._share

    def all_reduce(self, hosts: Sequence[Host], algorithm: str = "auto", side_by_side: int = 1) -> Way:
        """Returns an all-reduce among processes on these hosts, one each.

        `side_by_side` such groups use the hosts' cards at the same time, each with bytes of its own.
        """
        ranks = len(hosts)
        if ranks < 2:
            return Way()
        different = list({host.name: host for host in hosts}.values())
        most = max(Counter(host.name for host in hosts).values())
        inside = Way(0.0, 1 / min(host.bus_bytes_per_s for host in hosts))
        if len(different) == 1:
            flat = _FLAT.get(algorithm, ring)
            return flat(ranks, inside)
        across = self._slowest(different, side_by_side)
        if algorithm in _FLAT and (most == 1 or algorithm == "ring"):
            return _FLAT[algorithm](ranks, across)
        if algorithm in _FLAT:
            # All ranks of a host send through its card at the same time.
            return _FLAT[algorithm](ranks, Way(across.latency_s, across.s_per_byte * most))
        of_hosts = halving_doubling if algorithm == "halving_doubling" else ring
        outer = of_hosts(len(different), across)
        # The ranks of a host send its sum through its card, each a part of it.
        return ring(most, inside).then(replace(outer, moved=outer.moved / most)) if most > 1 else outer

    def _slowest(self, hosts: Sequence[Host], side_by_side: int) -> Way:
        """Returns the slowest way of a ring of hosts."""
        names = [host.name for host in hosts]
        pairs = list(zip(names, [*names[1:], names[0]], strict=True))
        if not self._cluster.links:
            way = self.between(hosts[0], hosts[1])
            return Way(way.latency_s, way.s_per_byte * side_by_side)
        rate = min(self._cluster.bandwidths(pairs)) * self._share
        latency_s = max(self._cluster.link(*pair).latency_s for pair in pairs)
        return Way(latency_s, side_by_side / rate)
