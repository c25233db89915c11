"""The order of a run with servers: who computes what, with which parameters, and when each push is applied.

It comes from a simulation, or from the events of a real run; what executes it does not know which.

    worker 0   fetch ─ step ─ push          fetch ─ step ─ push
    worker 1   fetch ──── step ─────── push
    queue      F0 F1              P0 F0          P1           P0        one line a server, or one for all

A worker's steps from one fetch to the next use the parameters that it has fetched, and its own local steps. So they can
be computed at the time of the fetch, when the servers' parameters are just those: no copy is kept for a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a worker.

    Attributes:
        round, part, parts: which part of which global batch it takes.
        lease: the number of its data lease.
        fetch: the number, counted by worker, of the fetch that it takes over before; -1 for none.
        last: whether its lease ends with it, so that the gradient is pushed.
        ended_s, compute_s, exchange_s, update_s: on the clock of the run.
    """

    round: int
    part: int
    parts: int
    lease: int
    fetch: int
    last: bool
    ended_s: float = 0.0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    update_s: float = 0.0


class ServerAction(NamedTuple):
    """What happens at a server next.

    Attributes:
        pushes: whether a push is applied; else parameters are fetched.
        number: of the push's lease, or of the worker's fetch.
        server: its place among the servers; -1 where all do the same at the same time.
        shards: those that it is about; () for all of the server's.
    """

    pushes: bool
    worker: int
    number: int
    server: int = -1
    shards: tuple[int, ...] = ()


@dataclass(frozen=True)
class SyncInterval:
    """What happens from one sync point to the next, which comes after `done` rounds, at a time on the run's clock.

    Attributes:
        steps: by worker, in order.
        queues: of servers that act each for itself, or one.
        busy_s: of a server, applying, in this interval.
    """

    done: int
    ended_s: float
    steps: Sequence[Sequence[PlannedStep]]
    queues: Sequence[Sequence[ServerAction]]
    busy_s: float = 0.0
