"""The order of the steps of a run that has not taken place, from its simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from headrace.policies.behaviour import ServerTerms
from headrace.prediction.rehearsal.order import PlannedStep, ServerAction, SyncInterval
from headrace.prediction.simulation.scene import DeviceStep, Scene
from headrace.prediction.simulation.served import ServedRun, Watcher
from headrace.prediction.simulation.timeline import Timeline


@dataclass
class _Lease:
    """A lease of a worker; `fetches` has, by the place of a step in it, the fetch that this step takes over."""

    lease: int
    began_s: float
    step_s: float
    fetches: dict[int, int] = field(default_factory=dict)


class OrderRecorder(Watcher):
    """Records what happens in a simulation, in order."""

    def __init__(self, workers: int, span: int) -> None:
        self.actions = [ServerAction(False, worker, 0) for worker in range(workers)]
        self.leases: list[list[_Lease]] = [[] for _ in range(workers)]
        self._span = span
        self._fetched = [1] * workers
        # Fetches that no step has taken over yet, and when they are there.
        self._waiting: list[list[tuple[int, float]]] = [[(0, 0.0)] for _ in range(workers)]
        self._computing = [False] * workers

    def begins(self, worker: int, lease: int, now_s: float, step_s: float) -> None:
        self.leases[worker].append(_Lease(lease, now_s, step_s))
        self._computing[worker] = True
        self._take(worker)

    def pushes(self, worker: int, lease: int, now_s: float) -> None:
        self._computing[worker] = False
        self.actions.append(ServerAction(True, worker, lease))

    def pulls(self, worker: int, now_s: float, there_s: float) -> None:
        number = self._fetched[worker]
        self._fetched[worker] += 1
        self.actions.append(ServerAction(False, worker, number))
        self._waiting[worker].append((number, there_s))
        if self._computing[worker]:
            self._take(worker)

    def _take(self, worker: int) -> None:
        """Lets the steps of the present lease take over what is there when they begin."""
        lease = self.leases[worker][-1]
        left = []
        for number, there_s in self._waiting[worker]:
            place = max(0, math.ceil((there_s - lease.began_s) / lease.step_s - 1e-9)) if lease.step_s else 0
            if place < self._span:
                lease.fetches[place] = number
            else:
                left.append((number, there_s))
        self._waiting[worker] = left


@dataclass
class SimulatedOrder:
    """Simulates one interval after the other, each with its own variation of the computing times.

    All workers begin an interval at the same time, with the parameters of that time.
    """

    scene: Scene
    steps: Sequence[DeviceStep]
    terms: ServerTerms
    parts: int
    _now_s: float = 0.0
    _intervals: int = 0
    _leases: int = 0

    def interval(self, first: int, until: int, now_s: float, versions: Sequence[Sequence[int]]) -> SyncInterval:
        """Returns what happens from round `first` to the sync point before round `until`."""
        self._now_s = now_s
        span, assumed = self.terms.span, self.scene.assumptions
        seed = assumed.seed + 1_000_003 * self._intervals
        scene = replace(self.scene, assumptions=replace(assumed, steps=until - first, seed=seed))
        alone = max(0, self.terms.alone - first)
        recorder = OrderRecorder(len(self.steps), span)
        timeline = ServedRun(scene, self.steps, replace(self.terms, alone=alone), recorder).run()
        rows = _rows(timeline, len(self.steps))
        planned = [
            list(self._planned(leases, rows[worker], first, until)) for worker, leases in enumerate(recorder.leases)
        ]
        actions = [
            action._replace(number=action.number + self._leases) if action.pushes else action
            for action in recorder.actions
        ]
        ended = now_s + timeline.seconds
        busy = timeline.server_busy.get("applying", 0.0) * timeline.seconds
        self._intervals += 1
        self._leases += -(-(until - first) // span) * self.parts
        return SyncInterval(until, ended, planned, [actions], busy)

    def _planned(
        self, leases: Sequence[_Lease], rows: Sequence[Sequence[float]], first: int, until: int
    ) -> Iterator[PlannedStep]:
        span = self.terms.span
        for index, lease in enumerate(leases):
            number, part = divmod(lease.lease, self.parts)
            rounds = min(span, until - first - number * span)
            for place in range(rounds):
                # Of a lease that is cut short, the last step is the one that exchanges.
                last = place + 1 == rounds
                ended, compute, exchange, update = rows[index * span + (span - 1 if last else place)]
                yield PlannedStep(
                    first + number * span + place, part, self.parts, self._leases + lease.lease,
                    lease.fetches.get(place, -1), last, self._now_s + ended, compute, exchange, update,
                )  # fmt: skip


def _rows(timeline: Timeline, workers: int) -> list[list[list[float]]]:
    """Returns when each step ended and what its parts took, by worker, in the worker's order."""
    rows: list[list[list[float]]] = [[] for _ in range(workers)]
    for worker, _, *times in timeline.rows():
        rows[worker].append(times)
    return rows
