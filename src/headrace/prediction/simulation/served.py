"""Workers that push gradients to servers and pull parameters, by the shard and the lease table of real servers.

    worker    ░compute░ ─ out ─┐                      ┌─ in ─ ░compute░
    server          in ────────▓▓▓ apply ── Shard ────┴ out

Each server takes what the others take at the same time, so one stands for all, with its part of the bytes. Its card
carries one message after the other in each direction, and its core applies one gradient after the other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from headrace.parameter_server.core.events import ApplyStep, Close, LeasesAhead, Pull, Push, Refuse, Reply
from headrace.parameter_server.core.leases import Ask, Commit, Grant, LeaseTable, Return
from headrace.parameter_server.core.shard import Shard
from headrace.policies.behaviour import ServerTerms
from headrace.policies.staleness import Bounded, EveryPush
from headrace.prediction.simulation.scene import DeviceStep, Scene, Seconds
from headrace.prediction.simulation.timeline import Timeline


class VirtualClock:
    """Calls functions at their times. Those of one time are called in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Callable[[int], None], int]] = []
        self._asked = 0

    def at(self, time_s: float, call: Callable[[int], None], number: int) -> None:
        """Calls `call(number)` at a time that is not past."""
        self._asked += 1
        heappush(self._waiting, (time_s, self._asked, call, number))

    def run(self) -> None:
        """Goes on until nothing is left to call."""
        waiting = self._waiting
        while waiting:
            self.now, _, call, number = heappop(waiting)
            call(number)


class Line:
    """Does one thing at a time, in the order in which they come: a direction of a network card, a server's core."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0

    def occupy(self, ready_s: float, seconds: float) -> float:
        """Returns when something is over that is ready at a time and takes so long."""
        self.free_s = max(self.free_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_s


class Watcher(ABC):
    """Is told what happens in a simulation, in the order in which the server sees it."""

    @abstractmethod
    def begins(self, worker: int, lease: int, now_s: float, step_s: float) -> None:
        """A worker begins to compute a lease, of which each step takes so long."""

    @abstractmethod
    def pushes(self, worker: int, lease: int, now_s: float) -> None:
        """A worker's push reaches the shard."""

    @abstractmethod
    def pulls(self, worker: int, now_s: float, there_s: float) -> None:
        """A worker is sent the parameters of `now_s`, and has them at `there_s`."""


class ServedRun:
    """The state of one simulation: call `run` once."""

    def __init__(
        self, scene: Scene, steps: Sequence[DeviceStep], terms: ServerTerms, watcher: Watcher | None = None
    ) -> None:
        workers = len(steps)
        self._watcher = watcher
        self._terms, self._clock = terms, VirtualClock()
        self._leases_each = -(-scene.assumptions.steps // terms.span)
        self._shard = Shard(range(workers), *terms.policies)
        alone = -(-terms.alone // terms.span)
        self._table = LeaseTable(
            workers - terms.spare, self._leases_each, fixed=terms.fixed, alone=alone, workers=range(workers)
        )
        computing = np.array([terms.span * (s.forward_s + s.backward_s + s.fixed_s) for s in steps])
        # Of each worker, by its leases.
        self._compute_s: list[list[float]] = (scene.variation(self._leases_each, workers) * computing).T.tolist()
        self._update_s = [terms.span * s.optimizer_s * terms.local for s in steps]
        self._into, self._core, self._out = Line(), Line(), Line()
        self._lease = [0] * workers
        self._version = [0] * workers
        self._done = [0] * workers
        self._free_s = [0.0] * workers
        self._closes_s = [math.inf] * workers
        if terms.patience_s < math.inf:
            # The last round may have fewer pushes than there are workers.
            self._shard.handle(LeasesAhead(self._leases_each * (workers - terms.spare)))
        self._began_s = [0.0] * workers
        self._rows = array("d")
        # Of each worker, the row of its last step.
        self._last = [0] * workers
        self._refused = 0
        self._staleness: Counter[int] = Counter()
        self._costs(scene)

    def _costs(self, scene: Scene) -> None:
        size = scene.model.trainable_bytes / self._terms.servers
        pushed, pulled = size * self._terms.pushed, size * self._terms.pulled
        server = scene.servers[0]
        self._add_s = size / scene.assumptions.apply_bytes_per_s
        compute = scene.model.compute
        # Each server updates its part, by the optimizer; where workers have their own, it adds up what they say.
        self._step_s = 0.0
        if compute and self._terms.optimizes:
            self._step_s = compute.optimizer_s / server.speed / self._terms.servers
        ways = [scene.network.between(host, server) for host in scene.hosts]
        remote = [host.name != server.name for host in scene.hosts]
        card = scene.network.card(server)
        # A message holds the server's card for its bytes, and comes when the sender has sent those of all servers.
        self._holds = [(pushed / card, pulled / card) if far else (pushed * way.s_per_byte, pulled * way.s_per_byte)
                       for way, far in zip(ways, remote, strict=True)]  # fmt: skip
        count = self._terms.servers
        extra = [
            max(0.0, count / self._terms.cards * way.s_per_byte - 1 / card) if far else 0.0
            for way, far in zip(ways, remote, strict=True)
        ]
        self._delay_s = [
            (way.latency_s + pushed * more, way.latency_s + pulled * more)
            for way, more in zip(ways, extra, strict=True)
        ]
        self._moved = count * (pushed + pulled) / self._terms.span

    def least_s(self) -> float:
        """Returns a time before which the simulation cannot end.

        That is the time of the steps and their own messages alone, and that of each line's messages alone.
        """
        terms, workers = self._terms, len(self._lease)
        leases = self._leases_each * (workers - terms.spare)
        in_s, out_s = np.array(self._holds).T
        there_s, back_s = np.array(self._delay_s).T
        own = np.array(self._compute_s) + np.array(self._update_s)[:, None]
        quickest = float(own.min())
        if not terms.overlap:
            own += (in_s + there_s + self._add_s + out_s + back_s)[:, None]
        lock_step = isinstance(terms.policies[0], Bounded) and terms.policies[0].bound == 0
        if terms.fixed:
            steps_s = float(own.max(axis=0).sum() if lock_step else own.sum(axis=1).max())
        else:
            # Whichever worker is free gets the next lease; the quickest of all could have done them all.
            steps_s = leases * float(own.min()) / workers
        # With overlap no worker waits for its last message.
        carried = leases - workers * terms.overlap
        updates = leases if isinstance(terms.policies[1], EveryPush) else 0
        core_s = carried * self._add_s + max(0, updates - workers * terms.overlap) * self._step_s
        lines_s = [carried * float(in_s.min()), core_s, carried * float(out_s.min())]
        if lock_step and terms.fixed:
            # No worker begins a round before the server has all of the one before.
            lines_s.append(self._leases_each * (workers * float(in_s.min()) + float(out_s.min()) + quickest))
        return max(steps_s, *lines_s)

    def run(self) -> Timeline:
        """Simulates all leases."""
        for worker in range(len(self._lease)):
            self._ask(worker, 0.0)
        self._clock.run()
        rows: Seconds = np.frombuffer(self._rows).reshape(-1, 6)
        workers = len(self._lease)
        # Where workers compute on meanwhile, the queue of the last pushes is part of the time; what a push alone takes
        # would be hidden behind the next steps of a longer run.
        alone_s = np.array(self._holds).sum(axis=1) + np.array(self._delay_s).sum(axis=1) + self._add_s
        late_s = np.maximum(0.0, np.array(self._free_s) - rows[self._last, 2] - alone_s)
        rows[self._last, 2] += late_s
        rows[self._last, 4] += late_s
        busy = np.bincount(rows[:, 0].astype(int), rows[:, 3] + rows[:, 5], workers).astype(float)
        seconds = float(rows[:, 2].max())
        return Timeline(
            worker=rows[:, 0].astype(np.int64),
            step=rows[:, 1].astype(np.int64),
            ended_s=rows[:, 2],
            compute_s=rows[:, 3],
            exchange_s=rows[:, 4],
            update_s=rows[:, 5],
            busy_s=busy,
            moved_bytes=self._moved,
            server_busy={
                "receiving": self._into.busy_s / seconds,
                "applying": self._core.busy_s / seconds,
                "sending": self._out.busy_s / seconds,
            },
            staleness=dict(sorted(self._staleness.items())),
            rounds=(len(rows) - self._refused * self._terms.span) / (workers - self._terms.spare),
        )

    def _ask(self, worker: int, now_s: float) -> None:
        """Begins a worker's next lease, if one is left for it."""
        for answer in self._table.handle(Ask(worker)):
            if isinstance(answer, Grant):
                self._begin(answer.worker, answer.lease, now_s)

    def _begin(self, worker: int, lease: int, now_s: float) -> None:
        self._lease[worker] = lease
        self._began_s[worker] = now_s
        takes_s = self._computing_s(worker) + self._update_s[worker]
        if self._watcher:
            self._watcher.begins(worker, lease, now_s, takes_s / self._terms.span)
        self._clock.at(now_s + takes_s, self._computed, worker)

    def _computing_s(self, worker: int) -> float:
        # A worker may have more leases than the others.
        times = self._compute_s[worker]
        return times[self._done[worker] % len(times)]

    def _computed(self, worker: int) -> None:
        """A worker has its gradient: the push leaves when the answer to the one before is there."""
        now_s = self._clock.now
        if self._free_s[worker] > now_s:
            self._clock.at(self._free_s[worker], self._computed, worker)
            return
        hold, delay = self._holds[worker][0], self._delay_s[worker][0]
        arrived = self._into.occupy(now_s + delay, hold)
        if self._watcher:
            self._watcher.pushes(worker, self._lease[worker], now_s)
        push = Push(worker, 0, self._lease[worker], self._version[worker], share=1 / len(self._lease))
        actions = self._shard.handle(push)
        updates = sum(isinstance(action, ApplyStep) for action in actions)
        applied = self._core.occupy(arrived, self._add_s + updates * self._step_s)
        refused = any(isinstance(action, Refuse) and action.worker == worker for action in actions)
        self._refused += refused
        self._carry_out(actions, applied)
        self._settle(Return(push.lease, worker) if refused else Commit(push.lease, worker))
        if not refused and self._terms.patience_s < math.inf:
            self._closes_s[worker] = now_s + self._terms.patience_s
            self._clock.at(self._closes_s[worker], self._close, worker)
        self._carry_out(self._shard.handle(Pull(worker)), applied)
        if self._terms.overlap:
            self._finish(worker, now_s)

    def _close(self, worker: int) -> None:
        """A worker has waited long enough, if it still waits for the same average."""
        now_s = self._clock.now
        if self._closes_s[worker] == now_s:
            actions = self._shard.handle(Close(worker))
            updates = sum(isinstance(action, ApplyStep) for action in actions)
            self._carry_out(actions, self._core.occupy(now_s + self._delay_s[worker][0], updates * self._step_s))

    def _settle(self, event: Commit | Return) -> None:
        for answer in self._table.handle(event):
            if isinstance(answer, Grant):
                self._begin(answer.worker, answer.lease, self._clock.now)

    def _carry_out(self, actions: Sequence[object], now_s: float) -> None:
        for action in actions:
            if isinstance(action, ApplyStep):
                self._staleness[action.staleness] += 1
            elif isinstance(action, Reply):
                worker = action.worker
                sent = self._out.occupy(now_s, self._holds[worker][1])
                self._version[worker] = action.version
                self._closes_s[worker] = math.inf
                self._free_s[worker] = sent + self._delay_s[worker][1]
                if self._watcher:
                    self._watcher.pulls(worker, now_s, self._free_s[worker])
                if not self._terms.overlap:
                    self._clock.at(self._free_s[worker], self._pulled, worker)

    def _pulled(self, worker: int) -> None:
        self._finish(worker, self._clock.now)

    def _finish(self, worker: int, now_s: float) -> None:
        """Ends a lease, and begins the next."""
        step, span = self._done[worker], self._terms.span
        update, compute = self._update_s[worker], self._computing_s(worker)
        exchange = now_s - self._began_s[worker] - compute - update
        for place in range(span):
            last = place + 1 == span
            ended = now_s if last else self._began_s[worker] + (place + 1) * (compute + update) / span
            self._rows.extend(
                (worker, step * span + place, ended, compute / span, exchange if last else 0.0, update / span)
            )
        self._done[worker] += 1
        self._last[worker] = len(self._rows) // 6 - 1
        self._ask(worker, now_s)


def served(scene: Scene, steps: Sequence[DeviceStep], terms: ServerTerms) -> Timeline:
    """Simulates workers and servers."""
    return ServedRun(scene, steps, terms).run()
