"""How long bytes are on their way: from host to host, and round an all-reduce.

What a collective takes is `latency_s + bytes * s_per_byte`. With n ranks, a bandwidth of B and a latency of a:

    ring              2 (n - 1) a           2 (n - 1) / n / B
    tree              2 ceil(log2 n) a      2 ceil(log2 n) / B
    halving_doubling  2 ceil(log2 n) a      2 (n - 1) / n / B      (Rabenseifner; once more unless n is a power of 2)
    hierarchical      inside each host, then a ring of the hosts, then inside each host again

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.

Between devices "auto" is what NCCL chooses by its own model (nccl/src/graph/tuning.cc), the quicker of

    its ring          2 (n - 1) steps of messages, all ranks in a ring that enters and leaves each host once
    its tree          a chain inside each host and trees of the hosts; 0.9 of the rate, and fewer, longer steps
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.devices import HOST
from headrace.prediction.assumptions import FASTEST_TCP_BYTES_PER_S, Assumptions
from headrace.spec.cluster import Cluster, Host

_START_S, _TREE_START_S = 8.4e-6, 4.4e-6
_TREE_CHUNK_S, _TREE_HOST_S = 28e-6, 50e-6
"""Of NCCL's model: what a ring and a tree take at least, and a chunk's way to the next device and to the next host."""
_TREE_SHARE = 0.9


@dataclass(frozen=True)
class Way:
    """What bytes take: `latency_s` once, and `s_per_byte` each; `moved` times of them a rank sends.

    `instead` is another way, which is taken where it is quicker.
    """

    latency_s: float = 0.0
    s_per_byte: float = 0.0
    moved: float = 0.0
    instead: Way | None = None

    def seconds(self, size: float) -> float:
        """Returns how long so many bytes take."""
        own = self.latency_s + size * self.s_per_byte if size else 0.0
        return min(own, self.instead.seconds(size)) if self.instead else own

    def part(self, share: float) -> Way:
        """Returns the way of a share of the bytes."""
        other = self.instead.part(share) if self.instead else None
        return Way(self.latency_s, self.s_per_byte * share, self.moved * share, other)

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


_FLAT = {"ring": ring, "tree": tree, "halving_doubling": halving_doubling}


class Network:
    """The links of a cluster, of whose bytes/s gradients attain a share."""

    def __init__(self, cluster: Cluster, assumed: Assumptions) -> None:
        self._cluster = cluster
        self._assumed = assumed
        self._share = assumed.share_of_link(cluster.device)
        self._latency_s = assumed.latency_of_link(cluster.device)
        self._most = assumed.tcp_bytes_per_s if cluster.device != HOST and not cluster.rdma else math.inf

    def between(self, source: Host, target: Host) -> Way:
        """Returns the way from a process on one host to one on another, or on the same."""
        if source.name == target.name:
            return self._bus(source)
        link = self._cluster.link(source.name, target.name)
        return Way(link.latency_s or self._latency_s, 1 / self._rate(link.bytes_per_s), 1.0)

    def _rate(self, bytes_per_s: float) -> float:
        """Returns what is attained of a link between hosts."""
        attained = bytes_per_s * self._share
        return attained if bytes_per_s > FASTEST_TCP_BYTES_PER_S else min(attained, self._most)

    def _bus(self, host: Host) -> Way:
        """Returns the way between two devices, or processes, of a host; an assumed rate is what is attained."""
        rate, device = host.bus_bytes_per_s, self._cluster.device
        share = 1.0 if rate == Host.bus_bytes_per_s else self._assumed.share_of_bus(device)
        return Way(self._assumed.latency_of_bus(device, rate), 1 / (rate * share), 1.0)

    def slowest(self, pairs: Sequence[tuple[Host, Host]]) -> Way:
        """Returns the slowest of the ways between the hosts of each pair."""
        inside = {one.name: one for one, other in pairs if one.name == other.name}
        across = [pair for pair in pairs if pair[0].name != pair[1].name]
        # Without links all ways from host to host are the same.
        ways = [self.between(*pair) for pair in (across if self._cluster.links else across[:1])]
        ways += [self._bus(host) for host in inside.values()]
        return Way(max(way.latency_s for way in ways), max(way.s_per_byte for way in ways), 1.0)

    def card(self, host: Host) -> float:
        """Returns the bytes/s of a host's network card: of its fastest link, also of those that no link names."""
        own = [link for link in self._cluster.links if host.name in (link.source, link.target)]
        rates = [link.bytes_per_s for link in own]
        if len({link.target for link in own if link.source == host.name}) < len(self._cluster.hosts) - 1:
            rates.append(self._cluster.link_bytes_per_s)
        return self._rate(max(rates, default=self._cluster.link_bytes_per_s))

    def all_reduce(self, hosts: Sequence[Host], algorithm: str = "auto", side_by_side: int = 1) -> Way:
        """Returns an all-reduce among processes on these hosts, one each.

        `side_by_side` such groups use the hosts' cards at the same time, each with bytes of its own.
        """
        ranks = len(hosts)
        if ranks < 2:
            return Way()
        if self.one_memory(hosts):
            # A rank writes what it has and reads the sum, of more than two also the part that it adds up.
            way = _FLAT.get(algorithm, ring)(ranks, self._bus(hosts[0]))
            return replace(way, moved=1.0 if ranks == 2 else 1.5)
        different = list({host.name: host for host in hosts}.values())
        most = max(Counter(host.name for host in hosts).values())
        inside = max((self._bus(host) for host in different), key=lambda way: way.s_per_byte)
        across = self._slowest(different, side_by_side) if len(different) > 1 else None
        if algorithm == "auto" and self._cluster.device != HOST:
            return _nccl(ranks, len(different), inside, across)
        if across is None:
            return _FLAT.get(algorithm, ring)(ranks, inside)
        if algorithm in _FLAT and (most == 1 or algorithm == "ring"):
            return _FLAT[algorithm](ranks, across)
        if algorithm in _FLAT:
            # All ranks of a host send through its card at the same time.
            return _FLAT[algorithm](ranks, Way(across.latency_s, across.s_per_byte * most))
        of_hosts = halving_doubling if algorithm == "halving_doubling" else ring
        outer = of_hosts(len(different), across)
        # The ranks of a host send its sum through its card, each a part of it.
        return ring(most, inside).then(replace(outer, moved=outer.moved / most)) if most > 1 else outer

    def gradients(self, hosts: Sequence[Host], algorithm: str = "auto", side_by_side: int = 1) -> Way:
        """Returns the all-reduce by which mirrors sum their gradients."""
        way, ranks = self.all_reduce(hosts, algorithm, side_by_side), len(hosts)
        # In shared memory they are written, a part of all is read and its sum written, and all is read.
        return replace(way, moved=(3 * ranks - 2) / (2 * ranks)) if self.one_memory(hosts) and ranks > 1 else way

    def one_memory(self, hosts: Sequence[Host]) -> bool:
        """Whether processes on these hosts exchange in memory that they share."""
        return self._cluster.device == HOST and len({host.name for host in hosts}) == 1

    def average(self, hosts: Sequence[Host], algorithm: str, side_by_side: int = 1) -> Way:
        """Returns an all-reduce of parameters; in memory that processes share each adds up a part."""
        way, ranks = self.all_reduce(hosts, algorithm, side_by_side), len(hosts)
        return replace(way, moved=(ranks - 1) / ranks) if self.one_memory(hosts) and ranks > 1 else way

    def divided(self, hosts: Sequence[Host], algorithm: str, parts: int, gathers: int, side_by_side: int = 1) -> Way:
        """Returns the ways of bytes of which each of so many ranks has a part, and other replicas the same parts.

        They are gathered so often, summed to parts, and each part is summed over the replicas.
        """
        groups = [hosts[first : first + parts] for first in range(0, len(hosts), parts)]
        # An all-reduce is a sum to parts, and a gather.
        inside = max((self.all_reduce(group, algorithm, side_by_side) for group in groups), key=lambda w: w.s_per_byte)
        # All ranks of a replica sum over the others at the same time.
        mates = min(parts, sum(host.name == hosts[0].name for host in hosts[:parts]))
        across = self.all_reduce(hosts[::parts], algorithm, side_by_side * mates).part(1 / parts)
        summed = 1.0 if self.one_memory(hosts) else (parts - 1) / parts
        moved = summed + gathers * self.gathered(hosts, parts)
        half = (1 + gathers) / 2
        both = Way(half * inside.latency_s, half * inside.s_per_byte, moved if parts > 1 else 0.0)
        return both.then(across)

    def gathered(self, hosts: Sequence[Host], parts: int) -> float:
        """Returns the part of the bytes that a rank sends where so many gather them once."""
        return (1 + 1 / parts) / 2 if self.one_memory(hosts) else (parts - 1) / parts

    def _slowest(self, hosts: Sequence[Host], side_by_side: int) -> Way:
        """Returns the slowest way of a ring of hosts."""
        names = [host.name for host in hosts]
        pairs = list(zip(names, [*names[1:], names[0]], strict=True))
        if not self._cluster.links:
            way = self.between(hosts[0], hosts[1])
            return Way(way.latency_s, way.s_per_byte * side_by_side)
        rate = self._rate(min(self._cluster.bandwidths(pairs)))
        latency_s = max(self._cluster.link(*pair).latency_s for pair in pairs) or self._latency_s
        return Way(latency_s, side_by_side / rate)


def _nccl(ranks: int, hosts: int, inside: Way, across: Way | None) -> Way:
    """Returns the ring of all ranks or the trees of hosts, whichever is quicker; both pass each host's card once."""
    slowest = max(inside.s_per_byte if ranks > hosts else 0.0, across.s_per_byte if across else 0.0)
    far_s = across.latency_s if across else 0.0
    steps = 2 * (ranks - hosts) * inside.latency_s + 2 * (hosts - 1) * far_s
    tree_s = 2 * (ranks / hosts - 1) * _TREE_CHUNK_S + 2 * math.log2(hosts) * (_TREE_HOST_S + far_s)
    moved = 2 * (ranks - 1) / ranks
    whole = Way(_TREE_START_S + tree_s, 2 * slowest / _TREE_SHARE, 2.0)
    return Way(_START_S + steps, moved * slowest, moved, whole)
