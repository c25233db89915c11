"""Version histories: what workers asked of a shard, when, and what they were told, held against what must be true.

unique            one applied push makes one version, which no other push makes; one lease is applied once
real-time order   what begins after another thing has ended sees at least that version; a push makes a later one
staleness         updates between what a gradient was made with and its own version are as many as are said, and
                  no more than the bound allows; no worker begins a round further ahead of the slowest than the bound
content           parameters that count pushes are what their version says, where a pull has read them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.parameter_server.core.events import Event, Join, Leave, Reason, Renew, Settle


@dataclass
class Operation:
    """A push or a pull of one worker at one shard.

    Attributes:
        worker, place: whose, and where.
        pushes: whether it is a push.
        began: when it was asked.
        ended: when the worker was told; infinite if it never was.
        version: that a pull has brought, or that a push has made; None if it has made none.
        lease: of a push.
        made_with: version that a push's gradient was made with.
        staleness: that the shard has said.
        refused: whether the worker was told that a push does not count, other than because it was applied before.
        content: pushes that are in the parameters that a pull has brought; None if no pull has read them.
    """

    worker: int
    place: int
    pushes: bool
    began: float
    ended: float = float("inf")
    version: int | None = None
    lease: int = -1
    made_with: int = 0
    staleness: int | None = None
    refused: bool = False
    content: int | None = None

    def tell(self, now: float, value: Any) -> None:
        """Notes what the worker was told: a pull a version, a push None or why it does not count."""
        self.ended = now
        if self.pushes:
            self.refused = value not in (None, Reason.DUPLICATE)
        else:
            self.version = value


def violations(operations: Iterable[Operation], workers: int, bound: int | None = None) -> list[str]:
    """Returns what is wrong with a history, in words.

    `bound` is the rounds that the fastest may be ahead of the slowest; None for any, or where workers come and go.
    """
    by_place: dict[int, list[Operation]] = {}
    for each in operations:
        by_place.setdefault(each.place, []).append(each)
    return [
        f"shard {place}: {words}"
        for place, own in by_place.items()
        for words in (*_doubles(own), *_disorder(own), *_staleness(own, workers, bound), *_leads(own, workers, bound))
    ]


def _doubles(operations: Sequence[Operation]) -> list[str]:
    found, versions, leases = [], set(), set()
    for each in operations:
        if not each.pushes:
            if each.content is not None and each.content != each.version:
                found.append(f"version {each.version} holds {each.content} pushes")
        elif each.version is not None:
            if each.version in versions:
                found.append(f"two pushes made version {each.version}")
            if each.lease in leases:
                found.append(f"lease {each.lease} was applied twice")
            if each.refused:
                found.append(f"lease {each.lease} was refused and made version {each.version}")
            versions.add(each.version)
            leases.add(each.lease)
    return found


def _disorder(operations: Sequence[Operation]) -> list[str]:
    found, newest = [], 0
    ended = sorted((each for each in operations if each.version is not None), key=lambda each: each.ended)
    place = 0
    for each in sorted(operations, key=lambda each: each.began):
        while place < len(ended) and ended[place].ended < each.began:
            newest = max(newest, ended[place].version or 0)
            place += 1
        if each.version is not None and (each.version < newest or (each.pushes and each.version == newest)):
            found.append(f"version {each.version} began at {each.began:.3f}, and {newest} had ended by then")
    return found


def _staleness(operations: Sequence[Operation], workers: int, bound: int | None) -> list[str]:
    found = []
    for each in operations:
        if each.pushes and each.version is not None:
            staleness = each.version - 1 - each.made_with
            # Others may finish rounds from `bound` behind to `bound` ahead meanwhile, and the one that they are at.
            most = float("inf") if bound is None else (workers - 1) * (2 * bound + 1)
            if not 0 <= staleness <= most or each.staleness not in (None, staleness):
                found.append(f"version {each.version} is {staleness} behind, said {each.staleness}, at most {most}")
    return found


def _leads(operations: Sequence[Operation], workers: int, bound: int | None) -> list[str]:
    """Looks at every pull that was answered: how far its worker was ahead, at the least."""
    if bound is None:
        return []
    found = []
    finished, begun = [0] * workers, [0] * workers
    pushes = [each for each in operations if each.pushes]
    steps = [(each.began, 0, each) for each in pushes]
    steps += [(each.ended, 1, each) for each in pushes if each.ended < float("inf")]
    steps += [(each.ended, 2, each) for each in operations if not each.pushes and each.ended < float("inf")]
    for _, what, each in sorted(steps, key=lambda step: step[:2]):
        if what == 0:
            begun[each.worker] += 1
        elif what == 1:
            finished[each.worker] += 1
        elif finished[each.worker] - min(begun) > bound:
            found.append(f"worker {each.worker} went on {finished[each.worker] - min(begun)} rounds ahead")
    return found


@dataclass
class BareBook:
    """A shard without any books: whatever it does goes."""

    machine: Any
    world: Any
    history: Any
    incarnations: dict[int, int] = field(default_factory=dict)
    late: bool = False

    def __post_init__(self) -> None:
        self.incarnations = dict.fromkeys(range(len(self.world.paces)), 0)

    @property
    def version(self) -> int:
        return int(self.machine.version)

    def handle(self, event: Event) -> list[Any]:
        if isinstance(event, Join):
            self.incarnations[event.worker] = event.incarnation
        elif isinstance(event, Leave):
            self.incarnations.pop(event.worker, None)
        return list(self.machine.handle(event))

    def renew(self, times: int) -> None:
        for _ in range(times):
            self.machine.handle(Renew())

    def settle(self, version: int) -> None:
        self.machine.handle(Settle(version))

    def close(self, stop: int) -> None:
        """There is nothing to hold it against."""
