"""The processes of a launcher measure the links between their hosts, and tell each other what is on each host.

First all connect to all, which shows who is not reached. Then disjoint pairs measure latency and clocks at the same
time; then one direction after another its bandwidth; then disjoint pairs theirs together, which is less where links
share a switch.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median

from headrace.devices import HOST, kind_of
from headrace.engine.network.interfaces import interfaces, other_interface
from headrace.engine.network.probe import TOKEN_BYTES, Echo, Responder, bandwidth, connect, echo
from headrace.engine.torchrun.address import own_address
from headrace.engine.torchrun.store import gather, of_first
from headrace.errors import UnfitMachine, UsageError
from headrace.spec.cluster import Cluster, Host, Link
from headrace.spec.plain import from_plain, to_plain

_DIVIDED = 0.8
"""Of their bandwidth alone: links that carry less together share something."""
_UNTOUCHED = 0.98
"""Of its bandwidth alone: a link that carries more together with others shares nothing with them."""

_Pair = tuple[int, int]
_Measure = Callable[[int, "LinkFacts"], "LinkFacts"]


@dataclass(frozen=True)
class HostFacts:
    """What a host says of itself.

    Attributes:
        facts: what must be the same on all hosts: versions, and digests of files; by name.
        shared_memory_bytes: that are free in /dev/shm.
        interface: says that its devices connect by another network interface than headrace; "" if they do not.
    """

    host: Host
    facts: Mapping[str, str]
    shared_memory_bytes: int
    port: int = 0
    interface: str = ""


@dataclass(frozen=True)
class LinkFacts:
    """What was measured of the way from one host to another.

    Attributes:
        alone: bytes/s while no other link was used, each time that it was measured.
        together: bytes/s by the number of a stage, in which disjoint links were used at the same time.
        ahead_s: how much the target's clock is ahead of the source's.
        error: why the target is not reached; "" where it is.
    """

    source: str
    target: str
    alone: tuple[float, ...] = ()
    latency_s: float = 0.0
    ahead_s: float = 0.0
    error: str = ""
    together: Mapping[str, float] = field(default_factory=dict)

    @property
    def alone_per_s(self) -> float:
        """The median of the measurements alone."""
        return median(self.alone)

    def divided(self, stage: str) -> bool:
        """Returns whether it carried less in that stage."""
        return self.together[stage] < _UNTOUCHED * self.alone_per_s

    @property
    def bytes_per_s(self) -> float:
        """The median of the measurements alone, and of those in which no other link mattered."""
        return median((*self.alone, *(rate for stage, rate in self.together.items() if not self.divided(stage))))


@dataclass(frozen=True)
class Survey:
    """What all hosts and all links are, in the order of the hosts' first ranks."""

    hosts: tuple[HostFacts, ...]
    links: tuple[LinkFacts, ...]

    def cluster(self) -> Cluster:
        """Returns what was measured, for planning; links that are not reached have no entry."""
        shared = _shared(self.links)
        links = tuple(
            Link(
                *(link.source, link.target, link.bytes_per_s, link.latency_s),
                "switch" if (link.source, link.target) in shared else "",
            )
            for link in self.links
            if not link.error
        )
        return Cluster(tuple(each.host for each in self.hosts), links=links)


def survey(own: HostFacts) -> Survey:
    """Measures all links; all the launcher's processes call it together, and the first of each host measures.

    Raises:
        UsageError: they are all on one host, or this host's address is one for itself.
    """
    rank = int(os.environ["RANK"])
    names = gather(own.host.name)
    leaders = [names.index(name) for name in dict.fromkeys(names)]
    if len(leaders) < 2:
        raise UsageError(f"all {len(names)} processes are on {names[0]}; start one on each host to measure the links")
    token = bytes.fromhex(of_first(lambda: secrets.token_hex(TOKEN_BYTES)))
    address = own_address()
    with ExitStack() as opened:
        responder = opened.enter_context(closing(Responder(address, token))) if rank in leaders else None
        host = replace(own.host, address=address, ranks=())
        said = _said_of_interface(host)
        facts = replace(own, host=host, port=responder.port if responder else 0, interface=said)
        told = gather(json.dumps(to_plain(facts)))
        hosts = [from_plain(HostFacts, json.loads(told[leader])) for leader in leaders]
        me = leaders.index(rank) if responder else -1
        links = _Measurement(me, hosts, token, opened).run()
    lists = [json.loads(text) for text in gather(json.dumps(to_plain(links)))]
    return Survey(tuple(hosts), tuple(from_plain(LinkFacts, each) for each in chain.from_iterable(lists)))


def _said_of_interface(host: Host) -> str:
    """Returns what `other_interface` does, or its error, where the user has said by which devices connect."""
    kind = kind_of(host.accelerators[0] if host.accelerators else HOST)
    if not (setting := os.environ.get(kind.interface, "")):
        # Then a run says it.
        return ""
    try:
        return other_interface(kind, host.address, interfaces(), setting)
    except UnfitMachine as error:
        return str(error)


class _Measurement:
    """This host's part: of the links that begin here. `me` is its place among the hosts, -1 for a rank without."""

    def __init__(self, me: int, hosts: Sequence[HostFacts], token: bytes, opened: ExitStack) -> None:
        self._me = me
        self._hosts = hosts
        self._token = token
        self._opened = opened
        self._links: dict[int, LinkFacts] = {}
        self._stages = 0
        self._connections: dict[int, socket.socket] = {}

    def run(self) -> list[LinkFacts]:
        rounds = disjoint_rounds(len(self._hosts))
        reached = self._reach()
        for pairs in rounds:
            for swap in (False, True):
                self._stage([(b, a) if swap else (a, b) for a, b in pairs], reached, self._echo)
        # More samples, where there are none of links that are used together.
        for _ in range(1 if len(rounds[0]) > 1 else 3):
            for pair in sorted(reached):
                self._stage([pair], reached, self._alone)
        for pairs in rounds if len(rounds[0]) > 1 else ():
            for flips in directions(len(pairs)):
                flipped = [(b, a) if flip else (a, b) for (a, b), flip in zip(pairs, flips, strict=True)]
                self._stage(flipped, reached, self._together)
        return list(self._links.values())

    def _reach(self) -> set[_Pair]:
        """Connects to all other hosts at once; returns which pairs of all hosts are connected."""
        others = [place for place in range(len(self._hosts)) if place != self._me] if self._me >= 0 else []
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            errors = dict(zip(others, pool.map(self._connect, others), strict=True))
        for place, error in errors.items():
            self._links[place] = LinkFacts(self._name(self._me), self._name(place), error=error)
        mine = [(self._me, place) for place, error in errors.items() if not error]
        return {(pair[0], pair[1]) for text in gather(json.dumps(mine)) for pair in json.loads(text)}

    def _connect(self, place: int) -> str:
        target = self._hosts[place]
        try:
            self._connections[place] = connect(target.host.address, target.port, self._token)
        except OSError as error:
            return f"{target.host.address}:{target.port}: {error}"
        return ""

    def _stage(self, pairs: Sequence[_Pair], reached: set[_Pair], measure: _Measure) -> None:
        """Measures pairs at the same time; the other hosts wait."""
        self._stages += 1
        for source, target in pairs:
            if source != self._me or (source, target) not in reached or self._links[target].error:
                continue
            try:
                self._links[target] = measure(target, self._links[target])
            except (OSError, EOFError) as error:
                # The others go on, and are told at the end.
                self._links[target] = replace(self._links[target], error=f"while it was measured: {error}")
        gather("")

    def _echo(self, target: int, link: LinkFacts) -> LinkFacts:
        with self._connections[target] as connection:
            found: Echo = echo(connection)
        return replace(link, latency_s=found.latency_s, ahead_s=found.ahead_s)

    def _alone(self, target: int, link: LinkFacts) -> LinkFacts:
        return replace(link, alone=(*link.alone, self._bandwidth(target, link)))

    def _together(self, target: int, link: LinkFacts) -> LinkFacts:
        return replace(link, together={**link.together, str(self._stages): self._bandwidth(target, link)})

    def _bandwidth(self, target: int, link: LinkFacts) -> float:
        there = self._hosts[target]
        return bandwidth(there.host.address, there.port, self._token, link.latency_s)

    def _name(self, place: int) -> str:
        return self._hosts[place].host.name


def disjoint_rounds(count: int) -> list[list[_Pair]]:
    """Returns rounds of pairs in which no host has two, such that all pairs occur once (the circle method).

    >>> disjoint_rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    places = list(range(count + count % 2))
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        # Of an odd number of hosts one has a pause.
        rounds.append([pair for pair in pairs if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def directions(pairs: int) -> list[tuple[bool, ...]]:
    """Returns which of several pairs are turned round, so that any two have had all four directions.

    Opposite directions of a switch's link do not share it, and which pairs cross it in one direction is not known.
    """
    found = [(False,) * pairs, (True,) * pairs]
    for bit in range((pairs - 1).bit_length()):
        pattern = tuple(bool(index >> bit & 1) for index in range(pairs))
        found += [pattern, tuple(not each for each in pattern)]
    return found


def _shared(links: Sequence[LinkFacts]) -> set[tuple[str, str]]:
    """Returns source and target of the links that carried less in some stage, the sum of all that did counts.

    Two connections that share a switch need not get equal parts of it.
    """
    stages: dict[str, list[LinkFacts]] = {}
    for link in links:
        for stage in link.together:
            if link.divided(stage):
                stages.setdefault(stage, []).append(link)
    return {
        (link.source, link.target)
        for stage, touched in stages.items()
        if len(touched) > 1
        and sum(each.together[stage] for each in touched) < _DIVIDED * sum(each.alone_per_s for each in touched)
        for link in touched
    }
