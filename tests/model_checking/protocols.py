"""What is explored: every protocol in a small bound, for each run of the tests, and in a full one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.policies.staleness import AllMembers, Bounded, EveryPush, FirstPushes
from model_checking.explorer import World
from model_checking.failover import Failover, FailoverSetting
from model_checking.membership import Agreement, AgreementSetting
from model_checking.pushes import Pushes, Setting
from model_checking.tables import Leases, Portions, TableSetting
from parameter_server.world import World as Given

__all__ = ["PROTOCOLS", "Protocol", "three"]


@dataclass(frozen=True)
class Protocol:
    """One protocol; `small` and `full` make the worlds of its bounds."""

    bound: str
    small: Callable[[], World]
    full: Callable[[], World]


def three(count: int) -> tuple[float, ...]:
    """Returns the paces of so many workers; in which order they come to a step is explored, not measured."""
    return (1.0,) * count


def _asynchronous(workers: int, faults: int, portions: int, returns: bool) -> Pushes:
    given = Given(0, three(workers), EVERY, EveryPush(), portions=portions, fences=(1,))
    return Pushes(Setting(given, faults, ("kill", "halt"), returns))


EVERY = Given(0, ()).admission


def _over_servers(faults: int) -> Pushes:
    given = Given(0, three(2), EVERY, EveryPush(), shards=2, portions=1, fences=(1,))
    return Pushes(Setting(given, faults, ("kill", "reconnect"), returns=False))


def _rounds(workers: int, faults: int, fences: tuple[int, ...] = (1,)) -> Pushes:
    given = Given(0, three(workers), EVERY, FirstPushes(workers), portions=workers, fences=fences, fixed=True)
    return Pushes(Setting(given, faults, ("kill", "reconnect", "poison", "halt"), returns=False))


def _backup_workers(workers: int, faults: int, rounds: int) -> Pushes:
    needed = workers - 1
    given = Given(0, three(workers), EVERY, FirstPushes(needed), portions=needed, fences=(rounds,))
    return Pushes(Setting(given, faults, ("kill", "poison"), returns=False))


def _bounded(workers: int, faults: int) -> Pushes:
    given = Given(0, three(workers), Bounded(0), portions=workers, fences=(1,), fixed=True, rests=True)
    return Pushes(Setting(given, faults, ("kill", "reconnect"), returns=False))


def _impatient(workers: int, faults: int) -> Pushes:
    given = Given(0, three(workers), EVERY, AllMembers(), portions=workers, fences=(1,), rests=True)
    return Pushes(Setting(given, faults, ("kill", "close"), returns=False))


PROTOCOLS = {
    "pushes, each a step": Protocol(
        "3 workers, 2 leases, 2 faults: kills, early sync points",
        lambda: _asynchronous(2, 1, 2, False),
        lambda: _asynchronous(3, 2, 2, False),
    ),
    "pushes of workers that come back": Protocol(
        "2 workers, 2 leases, 2 faults: kills, early sync points; who is killed is replaced",
        lambda: _asynchronous(2, 1, 1, True),
        lambda: _asynchronous(2, 2, 2, True),
    ),
    "pushes to two servers": Protocol(
        "2 workers, 2 servers, 3 faults: kills, broken links",
        lambda: _over_servers(1),
        lambda: _over_servers(3),
    ),
    "pushes in rounds": Protocol(
        "3 workers, 1 round, 2 faults: kills, broken links, NaN, early sync points",
        lambda: _rounds(2, 1),
        lambda: _rounds(3, 2),
    ),
    "rounds with a backup worker": Protocol(
        "3 workers of which 2 make a round, 1 round, 2 faults: kills, NaN",
        lambda: _backup_workers(2, 1, 2),
        lambda: _backup_workers(3, 2, 1),
    ),
    "bounded staleness": Protocol(
        "3 workers, bound 0, 1 round, 1 fault: kills, broken links",
        lambda: _bounded(2, 1),
        lambda: _bounded(3, 1),
    ),
    "rounds of all members": Protocol(
        "3 workers that leave while they have no lease, 1 round, 1 fault: kills, rounds that are closed early",
        lambda: _impatient(2, 1),
        lambda: _impatient(3, 1),
    ),
    "leases": Protocol(
        "3 workers, 2 leases, 3 faults: losses, returned leases, early sync points, a join",
        lambda: Leases(TableSetting(2, 2, fences=(1,))),
        lambda: Leases(TableSetting(3, 3, fences=(1,))),
    ),
    "leases with a fixed worker each": Protocol(
        "3 workers, 3 leases, 2 faults of the same kinds",
        lambda: Leases(TableSetting(2, 2, fences=(1,), fixed=True)),
        lambda: Leases(TableSetting(3, 2, portions=3, fences=(1,), fixed=True)),
    ),
    "portions": Protocol(
        "3 workers, 2 portions, 2 evaluations of one round, 2 faults of the same kinds",
        lambda: Portions(TableSetting(2, 1, fences=(1,))),
        lambda: Portions(TableSetting(3, 2, portions=2, fences=(1,))),
    ),
    "replication and failover": Protocol(
        "3 processes, 1 message, 2 faults: ends, false word of an end, a process more",
        lambda: Failover(FailoverSetting(2, 1, 1)),
        lambda: Failover(FailoverSetting(3, 1, 2)),
    ),
    "membership": Protocol(
        "3 members, 1 step, 1 fault: kills, lost messages",
        lambda: Agreement(AgreementSetting(2, 1, 1, ("kill", "lose", "suspect", "tick"))),
        lambda: Agreement(AgreementSetting(3, 1, 1, ("kill", "lose"))),
    ),
    "membership that changes": Protocol(
        "2 members and one that joins, 2 steps, 2 faults: joins, leaves, kills",
        lambda: Agreement(AgreementSetting(2, 1, 1, ("join", "leave", "kill"))),
        lambda: Agreement(AgreementSetting(2, 2, 2, ("join", "leave", "kill"))),
    ),
}
