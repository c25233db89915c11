"""The event files of a rehearsal, as a real run writes them, with virtual times."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from headrace.machine.identity import versions
from headrace.prediction.rehearsal.order import PlannedStep
from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    ServerEnded,
    ServerStarted,
    Stepped,
    WorkerEnded,
    WorkerStarted,
    encode,
)
from headrace.spec.job import Share
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan
from headrace.worker.run_spec import RunSpec, events_path

_TOLD = 50
"""Counts of the servers, in an interval that is as long as the first."""


class VirtualEvents:
    """Collects the events of all processes, and writes each process's file when the run has ended.

    Args:
        plan: what a reader is to see: the hosts of the cluster.
        interval_s: about how long it is from one sync point to the next.
        moved_bytes: of a worker in a step.
    """

    def __init__(self, run: RunSpec, plan: Plan, examples: int, interval_s: float, moved_bytes: float) -> None:
        self._run, self._plan, self._moved = run, plan, moved_bytes
        self._lines: dict[int, list[tuple[float, str]]] = defaultdict(list)
        self._steps: dict[int, int] = defaultdict(int)
        self._every_s = interval_s / _TOLD
        self._next_s = self._every_s
        role = plan.roles[0]
        self.write(
            RunStarted(
                LAUNCHER,
                0.0,
                strategy=plan.strategy,
                workers=plan.workers,
                device=role.device.partition(":")[0],
                threads=role.threads,
                global_batch_size=run.job.global_batch_size,
                examples_per_epoch=examples,
                started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
                plan=to_plain(plan),
                versions=versions(),
            )
        )
        for each in plan.roles:
            if each.kind == "worker":
                self.write(WorkerStarted(each.rank, 0.0, each.host, os.getpid(), each.device, each.threads))
            else:
                size = run.model.trainable_bytes // max(1, len(plan.servers))
                shards = len(run.plan.segments) // max(1, len(plan.servers))
                self.write(ServerStarted(each.rank, 0.0, each.host, os.getpid(), shards, size))

    def write(self, event: Event) -> None:
        """Adds an event."""
        self._steps[event.rank] += isinstance(event, Stepped)
        self._lines[event.rank].append((event.time_s, encode(event)))

    def note(self, rank: int, time_s: float, text: str) -> None:
        """Adds a line for the user."""
        self.write(Notice(rank, time_s, text))

    def stepped(
        self, worker: int, planned: PlannedStep, share: Share, loss: float | None, weight: float, late: bool
    ) -> None:
        """Adds a worker's step; what comes too late counts when its data is leased again."""
        examples, weight = (0, 0.0) if late else (share.examples, weight)
        lease = planned.lease if examples else -1
        times = planned.compute_s, planned.exchange_s, planned.update_s
        event = Stepped(worker, planned.ended_s, planned.round, share.epoch, examples, loss, weight, 0.0, *times, lease)
        self.write(event)

    def due(self, time_s: float) -> bool:
        """Returns whether servers tell their counts at a time, as they do about once a second."""
        if time_s < self._next_s:
            return False
        self._next_s = time_s + self._every_s
        return True

    def evaluated(
        self, time_s: float, done: int, epoch: int, examples: int, metrics: Mapping[str, float], seconds: float
    ) -> None:
        """Adds an evaluation, by the first worker."""
        self.write(Evaluated(0, time_s, done, epoch, examples, metrics, seconds))

    def end(self, time_s: float, servers: Sequence[tuple[int, int]]) -> None:
        """Adds the last events; `servers` are the bytes of parameters and optimizer state of each."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        size = self._run.model.parameter_bytes
        for role in self._plan.roles:
            if role.kind == "worker":
                steps = self._steps[role.rank]
                self.write(WorkerEnded(role.rank, time_s, steps, round(steps * self._moved), peak, size, 0))
        steps = sum(self._steps.values())
        for rank, (parameters, optimizer) in zip(self._plan.servers, servers, strict=True):
            moved = round(steps * self._moved / len(servers))
            self.write(ServerEnded(rank, time_s, moved, peak, parameters, optimizer))
        self.write(RunEnded(LAUNCHER, time_s, "ok"))

    def save(self, directory: Path) -> None:
        """Writes all files."""
        for rank, lines in self._lines.items():
            path = events_path(directory, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines.sort(key=lambda line: line[0])
            path.write_text("".join(f"{text}\n" for _, text in lines), encoding="utf-8")
