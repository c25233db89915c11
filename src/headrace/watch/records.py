"""What is rare in a run, by time: evaluations, checkpoints, averaging, processes, and lines for the user."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from headrace.report.format import byte_count, clean, plural
from headrace.report.model.training import logged_curves
from headrace.report.views.live import non_finite_text
from headrace.spec.events import (
    BackupReady,
    Evaluated,
    Event,
    Failed,
    Lost,
    NonFinite,
    Notice,
    ParametersAveraged,
    RowsMoved,
    RunEnded,
    RunStarted,
    Saved,
    ServerEnded,
    ServerStarted,
    SharesBalanced,
    SnapshotTaken,
    ValuesLogged,
    WorkerEnded,
    WorkerStarted,
)
from headrace.watch.steps import Steps

_LINES = 300
_SAVED = 100
_EVALUATIONS = 1000
_MEETINGS = 400
_LOSSES = 50
_FAULTS = ("failed", "lost", "not finite")
_MARKS = 30
_MOST_TEXT, _MOST_TRACEBACK = 4000, 8000
_MOST_NAME, _MOST_CURVES = 200, 64


@dataclass(frozen=True)
class JournalLine:
    """A line of the journal."""

    time_s: float
    kind: str
    rank: int
    text: str
    detail: str = ""


class Journal:
    """What happened: notices, failures, losses. Of too many lines the oldest of the most frequent kind go."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lines: list[JournalLine] = []

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether it is one for the user."""
        detail = ""
        match event:
            case Notice():
                kind, text = "notice", event.text
            case Failed():
                at = "" if "at step" in event.cause else f" (at step {event.step})"
                kind, text, detail = "failed", f"{event.cause}{at}", event.traceback
            case Lost():
                kind, text = "lost", event.line
            case NonFinite():
                kind, text = "not finite", f"{non_finite_text(event)} at step {event.step}: {event.action}"
            case SharesBalanced():
                kind, text = "balance", event.line
            case BackupReady():
                text = (
                    f"the backup of rank {event.backup} can follow its server after {event.unguarded_s:.1f} s without"
                )
                kind = "backup"
            case RowsMoved():
                kind, text = "rows", f"{event.rows} rows of {event.table} moved to server {event.to}"
            case RunStarted():
                resumed = f", from step {event.resumed_step} on" if event.resumed_step else ""
                kind, text = "started", f"{event.strategy} with {plural(event.workers, 'worker')}{resumed}"
            case RunEnded():
                kind, text = "ended", f"{event.status}: {event.words}" if event.words else event.status
            case _:
                return False
        self.counts[kind] += 1
        line = JournalLine(event.time_s, kind, event.rank, clean(text)[:_MOST_TEXT], clean(detail)[:_MOST_TRACEBACK])
        insort(self._lines, line, key=lambda each: each.time_s)
        if len(self._lines) > _LINES:
            most = Counter(each.kind for each in self._lines).most_common(1)[0][0]
            del self._lines[next(index for index, each in enumerate(self._lines) if each.kind == most)]
        return True

    def marks(self, first_s: float) -> list[JournalLine]:
        """Returns the last faults, the starts after the first one, and ends that are none of all rounds."""
        found = (
            each
            for each in self._lines
            if each.kind in _FAULTS
            or (each.kind == "started" and each.time_s > first_s)
            or (each.kind == "ended" and each.text != "ok")
        )
        return list(found)[-_MARKS:]

    def message(self) -> dict[str, Any]:
        """Returns the lines, the newest first."""
        return {"lines": [vars(each) for each in reversed(self._lines)], "counts": dict(self.counts)}


class SaveLog:
    """Checkpoints of the run and snapshots of its servers."""

    def __init__(self) -> None:
        self.count = 0
        self._saved: list[Saved] = []
        self._snapshots: dict[int, tuple[int, SnapshotTaken]] = {}

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether it is of a checkpoint or a snapshot."""
        if isinstance(event, SnapshotTaken):
            count, last = self._snapshots.get(event.rank, (0, event))
            self._snapshots[event.rank] = count + 1, max(last, event, key=lambda each: each.time_s)
        elif isinstance(event, Saved):
            self.count += 1
            insort(self._saved, event, key=lambda each: each.time_s)
            del self._saved[:-_SAVED]
        return isinstance(event, SnapshotTaken | Saved)

    def message(self) -> dict[str, Any]:
        """Returns the last checkpoints, the newest first, and the last snapshot of each server."""
        return {
            "count": self.count,
            "saved": [
                {"step": each.step, "time_s": each.time_s, "bytes": each.bytes, "stall_s": each.stall_s}
                | {"write_s": each.write_s}
                for each in reversed(self._saved)
            ],
            "snapshots": [
                {"rank": rank, "count": count, "time_s": last.time_s, "bytes": last.bytes, "pause_s": last.pause_s}
                for rank, (count, last) in sorted(self._snapshots.items())
            ],
        }


class Evaluations:
    """Evaluations by time; every other one goes where there are too many.

    Attributes:
        pauses: when training stood still for an evaluation, by time: for all of them, also those that are not shown.
    """

    def __init__(self) -> None:
        self.revision = -1
        self.events: list[Evaluated] = []
        self.pauses: list[Evaluated] = []

    def add(self, event: Evaluated, revision: int) -> None:
        """Takes an evaluation."""
        self.revision = revision
        insort(self.pauses, replace(event, metrics={}), key=lambda each: each.time_s)
        insort(self.events, event, key=lambda each: each.time_s)
        if len(self.events) > _EVALUATIONS:
            del self.events[1:-1:2]


class DriftCurve:
    """When workers averaged their parameters, and how far apart they were; one point a meeting."""

    def __init__(self) -> None:
        self._seen: list[ParametersAveraged] = []

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether it is an averaging.

        Of those that several workers tell of one meeting, that with the largest drift stays.
        """
        if not isinstance(event, ParametersAveraged):
            return False
        for index in range(len(self._seen) - 1, max(-1, len(self._seen) - 1 - 64), -1):
            if event.meeting and self._seen[index].meeting == event.meeting:
                if event.drift > self._seen[index].drift:
                    self._seen[index] = event
                return True
        insort(self._seen, event, key=lambda each: each.time_s)
        if len(self._seen) > _MEETINGS:
            pairs = zip(self._seen[::2], self._seen[1::2], strict=False)
            tail = self._seen[-1:] if len(self._seen) % 2 else []
            self._seen = [max(pair, key=lambda each: each.drift) for pair in pairs] + tail
        return True

    def message(self) -> dict[str, Any]:
        """Returns drift and period over time, and the last reason for the period."""
        return {
            "time_s": [each.time_s for each in self._seen],
            "drift": [each.drift for each in self._seen],
            "period": [each.period for each in self._seen],
            "why": clean(self._seen[-1].why)[:_MOST_TEXT] if self._seen else "",
        }


class LoggedNumbers:
    """Numbers that callbacks, a strategy or a loop have logged, by curve, at most so many of each."""

    def __init__(self) -> None:
        self._curves: dict[str, list[tuple[float, float, int]]] = {}
        self._starts: list[RunStarted] = []

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether it changes a curve. What a later attempt repeats counts once."""
        if isinstance(event, RunStarted):
            self._starts.append(event)
            for points in self._curves.values():
                points[:] = [each for each in points if not self._is_done_again(each[0], each[2])]
            return bool(self._curves)
        if not isinstance(event, ValuesLogged) or self._is_done_again(event.time_s, event.step):
            return False
        for name, value in logged_curves(event).items():
            if name not in self._curves and len(self._curves) >= _MOST_CURVES:
                continue
            points = self._curves.setdefault(name, [])
            insort(points, (event.time_s, value, event.step))
            if len(points) > _EVALUATIONS:
                del points[1:-1:2]
        return True

    def _is_done_again(self, time_s: float, step: int) -> bool:
        return any(time_s < each.time_s and step > each.resumed_step for each in self._starts)

    def message(self) -> list[dict[str, Any]]:
        """Returns the curves by name: the run's seconds, and the numbers."""
        return [
            {
                "name": clean(name)[:_MOST_NAME],
                "time_s": [each[0] for each in points],
                "values": [each[1] for each in points],
            }
            for name, points in sorted(self._curves.items())
        ]


@dataclass
class _Process:
    """A worker or server; `lost` are the times from a loss to the next start."""

    role: str = "worker"
    host: str = ""
    device: str = ""
    state: str = "starting"
    step: int | None = None
    step_s: float | None = None
    time_s: float = 0.0
    peak: int | None = None
    parameters: int | None = None
    optimizer: int | None = None
    lost: list[list[float | None]] = field(default_factory=list)


class ProcessTable:
    """The workers and servers of a run."""

    def __init__(self) -> None:
        self._by_rank: dict[int, _Process] = {}

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether it is about a process."""
        match event:
            case WorkerStarted():
                self._began(event.rank, event.time_s, "worker", event.host, event.device)
            case ServerStarted():
                self._began(event.rank, event.time_s, "server", event.host, "").parameters = event.parameter_bytes
            case WorkerEnded() | ServerEnded():
                process = self._process(event.rank)
                process.state, process.time_s, process.peak = "ended", event.time_s, event.peak_memory_bytes
                process.parameters, process.optimizer = event.parameter_bytes, event.optimizer_bytes
            case Lost():
                process = self._process(event.lost)
                if event.time_s >= process.time_s:
                    process.state = "lost"
                process.lost = [*process.lost[1 - _LOSSES :], [event.time_s, None]]
            case Failed():
                self._process(event.rank).state = "failed"
            case _:
                return False
        return True

    def stepped(self, steps: Steps) -> None:
        """Takes the last step of each worker."""
        spent = steps.spent_s.sum(axis=1)
        order = steps.time_s.argsort(kind="stable")
        last = dict(zip(steps.rank[order].tolist(), order.tolist(), strict=True))
        for rank, index in last.items():
            process = self._process(rank)
            if (time_s := float(steps.time_s[index])) >= process.time_s:
                process.step, process.step_s = int(steps.step[index]), float(spent[index])
                process.time_s = time_s
                if process.state == "starting":
                    process.state = "running"

    def message(self) -> list[dict[str, Any]]:
        """Returns each process, by rank."""
        return [{"rank": rank, **vars(process)} for rank, process in sorted(self._by_rank.items())]

    @property
    def peak(self) -> str:
        """The largest memory of a process that has ended."""
        known = [each.peak for each in self._by_rank.values() if each.peak is not None]
        return byte_count(max(known, default=None))

    def _process(self, rank: int) -> _Process:
        return self._by_rank.setdefault(rank, _Process())

    def _began(self, rank: int, time_s: float, role: str, host: str, device: str) -> _Process:
        process = self._process(rank)
        process.role, process.host, process.device = role, clean(host)[:_MOST_TEXT], clean(device)[:_MOST_TEXT]
        if time_s >= process.time_s:
            process.state, process.time_s = "running", time_s
        for each in process.lost:
            if each[1] is None and each[0] is not None and each[0] <= time_s:
                each[1] = time_s
        return process
