"""Random worlds by regime, and machines with planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

from headrace.policies.staleness import AllMembers, Bounded, FirstPushes
from parameter_server.virtual import Machines, World, run

Regime = Callable[[random.Random, dict[str, Any]], World]


def _asynchronous(chance: random.Random, given: dict[str, Any]) -> World:
    return World(portions=chance.randint(1, 3), **given)


def _bounded(chance: random.Random, given: dict[str, Any]) -> World:
    return World(portions=len(given["paces"]), fixed=True, admission=Bounded(chance.randint(0, 2)), **given)


def _bounded_on_demand(chance: random.Random, given: dict[str, Any]) -> World:
    return World(portions=len(given["paces"]), admission=Bounded(chance.randint(0, 2)), rests=True, **given)


def _bounded_resting(chance: random.Random, given: dict[str, Any]) -> World:
    bound = Bounded(chance.randint(0, 2))
    return World(portions=len(given["paces"]), fixed=True, admission=bound, rests=True, **given)


def _lock_step(chance: random.Random, given: dict[str, Any]) -> World:
    workers = len(given["paces"])
    return World(portions=workers, fixed=True, combination=FirstPushes(workers), **given)


def _resting(regime: Regime) -> Regime:
    """A worker without a lease leaves until it has one; so no server is told how many come."""
    return lambda chance, given: regime(chance, given | {"rests": True, "ahead": False})


def _one_shard(regime: Regime) -> Regime:
    return lambda chance, given: regime(chance, given | {"shards": 1})


def _backups(chance: random.Random, given: dict[str, Any]) -> World:
    needed = chance.randint(1, len(given["paces"]))
    return World(portions=needed, combination=FirstPushes(needed), **given)


def _impatient(chance: random.Random, given: dict[str, Any]) -> World:
    patience = chance.choice((0.1, 1.0, 5.0))
    return World(portions=len(given["paces"]), combination=AllMembers(), patience=patience, **given)


def _backups_with_an_arbiter(chance: random.Random, given: dict[str, Any]) -> World:
    return _backups(chance, given | {"arbiter": True})


PEACE: dict[str, Regime] = {
    "asynchronous": _asynchronous,
    "bounded": _bounded,
    "bounded, on demand": _bounded_on_demand,
    "lock-step": _lock_step,
    "backups": _one_shard(_backups),
    "backups, shards": _backups_with_an_arbiter,
    "lock-step, resting": _resting(_lock_step),
    "backups, resting": _one_shard(_resting(_backups)),
    "impatient, resting": _one_shard(_resting(_impatient)),
}
"""No worker is lost."""

DEATHS: dict[str, Regime] = {
    "asynchronous": _asynchronous,
    "bounded": _bounded_resting,
    "bounded, on demand": _bounded_on_demand,
    "lock-step": _lock_step,
    "lock-step, resting": _resting(_lock_step),
    "backups": _one_shard(_backups),
    "backups, resting": _one_shard(_resting(_backups)),
    "impatient, resting": _one_shard(_resting(_impatient)),
}
"""Workers are lost at any moment, for ever or for a while."""


def world(regimes: dict[str, Regime], name: str, seed: int) -> World:
    """Returns one random world of a regime."""
    chance = random.Random(f"{name} {seed}")
    given: dict[str, Any] = {
        "seed": seed,
        "paces": tuple(chance.choice((0.2, 1.0, 1.0, 4.0)) for _ in range(chance.randint(1, 5))),
        "shards": chance.randint(1, 3),
        "fences": tuple(sorted(chance.sample(range(1, 6), chance.randint(1, 2)))),
        "latency": chance.choice((0.0, 0.5, 4.0)),
        "empty": chance.choice((0.0, 0.2)),
        "sick": chance.choice((0.0, 0.2)),
        "eager": chance.random() < 0.5,
        "halts": chance.choice((0, 0, 1)),
    }
    if regimes is DEATHS:
        given |= {"deaths": chance.randint(1, 3), "forever": chance.random() < 0.5}
    return regimes[name](chance, given)


def mutated(module: ModuleType, name: str, old: str, new: str) -> Any:
    """Returns what a module would hold by this name if its source said `new` where it says `old`.

    All other public names are the module's own, so that its events are what the rest knows.
    """
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source.count(old) == 1, f"{source.count(old)} places are {old!r}"
    made = ModuleType(module.__name__)
    made.__dict__["__name__"] = module.__name__
    exec(compile(source.replace(old, new), f"mutated {name}", "exec"), made.__dict__)
    mutant = made.__dict__[name]
    own = [other for other, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    made.__dict__.update(
        {other: getattr(module, other) for other in own if other != name and not other.startswith("_")}
    )
    return mutant


def is_found(machines: Machines, histories: int = 60) -> bool:
    """Tells whether any of so many histories of every regime shows that a machine is wrong."""
    every = [(regimes, name) for regimes in (DEATHS, PEACE) for name in regimes]
    worlds = (world(*each, seed) for seed in range(histories) for each in every)
    return any(_fails(each, machines) for each in worlds)


def _fails(world: World, machines: Machines) -> bool:
    try:
        run(world, machines)
    except (AssertionError, LookupError):
        return True
    return False
