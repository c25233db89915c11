"""Worlds of so many operations, and shards with a bug each that their histories must show."""

from __future__ import annotations

import random

from headrace.policies.staleness import Bounded, Unbounded
from parameter_server.operations import violations
from parameter_server.virtual import Machines, Stuck, World, run

MODERATE = 300
"""Operations of a history, about. More and longer ones: benchmarks/version-histories."""


def world(seed: int, operations: int = MODERATE) -> tuple[World, int | None]:
    """Returns a random world of about so many operations, and its bound if that can be held against it."""
    chance = random.Random(seed)
    workers, shards = chance.randint(2, 5), chance.randint(1, 2)
    bound, deaths = chance.choice((None, 0, 1, 2)), chance.choice((0, 0, 2))
    rounds = max(1, operations // (2 * shards * workers))
    made = World(
        seed,
        tuple(chance.choice((0.2, 1.0, 1.0, 4.0)) for _ in range(workers)),
        Unbounded() if bound is None else Bounded(bound),
        shards=shards,
        portions=workers,
        fences=(max(1, rounds // 2), rounds + 1),
        fixed=bound is not None,
        latency=chance.choice((0.0, 0.5, 4.0)),
        empty=0.0,
        sick=chance.choice((0.0, 0.1)),
        deaths=deaths,
        rests=bound is not None and deaths > 0,
    )
    return made, None if deaths else bound


def found(machines: Machines, histories: int) -> list[str]:
    """Returns the first violations among so many histories."""
    for seed in range(histories):
        made, bound = world(seed)
        try:
            wrong = violations(run(made, machines).operations, len(made.paces), bound)
        except Stuck:
            continue
        if wrong:
            return wrong
    return []


SEEDED = {
    "a version twice": (
        "            self.version += 1\n        return [*step",
        "            pass\n        return [*step",
    ),
    "an older version": ("[Reply(worker, self.version) for", "[Reply(worker, self.version - 1) for"),
    "a version of the future": ("[Reply(worker, self.version) for", "[Reply(worker, self.version + 1) for"),
    "no worker is bound": ("and self._admission.admits(self.clocks[worker], slowest)", "and True"),
    "a bound too wide": ("admits(self.clocks[worker], slowest)", "admits(self.clocks[worker] - 1, slowest)"),
    "the slowest is the fastest": ("slowest = min(", "slowest = max("),
    "a lease twice": ("if push.lease not in self._done and push.finite", "if push.finite"),
    "rounds that do not count": ("+= 1\n        step: list[Action] = []", "+= 0\n        step: list[Action] = []"),
    "back to the begin": ("self.version = max(self.version, event.version)", "self.version = event.version"),
    "refused and applied": ("not in self._done and push.finite and", "not in self._done and"),
    "staleness from nowhere": ("self.version - push.version)", "self.version)"),
}
