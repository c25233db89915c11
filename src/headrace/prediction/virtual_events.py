"""The event files of a run in virtual time, as a real run writes them, so that `headrace report` draws it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from headrace.machine.identity import versions
from headrace.spec.events import (
    LAUNCHER,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    ServerEnded,
    Stepped,
    WorkerEnded,
    WorkerStarted,
    encode,
)
from headrace.spec.model import ModelSpec
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan
from headrace.worker.run_spec import events_path


class VirtualEvents:
    """Collects the events of all processes, and writes each process's file when the run has ended.

    Args:
        plan: what a reader is to see: the hosts of the cluster.
        examples: of an epoch, in batches of `global_batch_size`.
        moved_bytes: of a worker in a step.
        pid: of the process that computes; 0 where nothing is computed.
    """

    def __init__(
        self, plan: Plan, model: ModelSpec, global_batch_size: int, examples: int, moved_bytes: float, pid: int = 0
    ) -> None:
        self.plan, self._model, self._moved = plan, model, moved_bytes
        self._lines: dict[int, list[tuple[float, str]]] = defaultdict(list)
        self._steps: dict[int, int] = defaultdict(int)
        role = plan.roles[0]
        self.write(
            RunStarted(
                LAUNCHER,
                0.0,
                strategy=plan.strategy,
                workers=plan.workers,
                device=role.device.partition(":")[0],
                threads=role.threads,
                global_batch_size=global_batch_size,
                examples_per_epoch=examples,
                started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
                plan=to_plain(plan),
                versions=versions(),
            )
        )
        for role in plan.roles[: plan.workers]:
            self.write(WorkerStarted(role.rank, 0.0, role.host, pid, role.device, role.threads))

    def write(self, event: Event) -> None:
        """Adds an event."""
        self._steps[event.rank] += isinstance(event, Stepped)
        self._lines[event.rank].append((event.time_s, encode(event)))

    def note(self, rank: int, time_s: float, text: str) -> None:
        """Adds a line for the user."""
        self.write(Notice(rank, time_s, text))

    def end(self, time_s: float, memory_bytes: int, servers: Sequence[tuple[int, int]] = ()) -> None:
        """Adds the last events.

        Args:
            memory_bytes: of each process.
            servers: the bytes of parameters and optimizer state of each.
        """
        size = self._model.parameter_bytes
        for rank in range(self.plan.workers):
            steps = self._steps[rank]
            self.write(WorkerEnded(rank, time_s, steps, round(steps * self._moved), memory_bytes, size, 0))
        steps = sum(self._steps.values())
        for rank, (parameters, optimizer) in zip(self.plan.servers if servers else (), servers, strict=True):
            moved = round(steps * self._moved / len(servers))
            self.write(ServerEnded(rank, time_s, moved, memory_bytes, parameters, optimizer))
        self.write(RunEnded(LAUNCHER, time_s, "ok"))

    def save(self, directory: Path) -> None:
        """Writes all files."""
        for rank, lines in self._lines.items():
            path = events_path(directory, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines.sort(key=lambda line: line[0])
            path.write_text("".join(f"{text}\n" for _, text in lines), encoding="utf-8")
