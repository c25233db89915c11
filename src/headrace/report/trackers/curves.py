"""What of a run's events are values over time, in the names that every tracker shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from headrace.report.model.training import STEPPED_PARTS, logged_curves
from headrace.report.views.live import non_finite_text
from headrace.spec.events import (
    Evaluated,
    Event,
    Failed,
    Lost,
    NonFinite,
    Notice,
    ParametersAveraged,
    PictureLogged,
    RunEnded,
    RunStarted,
    Saved,
    SharesBalanced,
    Stepped,
    TextLogged,
    ValuesLogged,
    WorkerEnded,
    WorkerStarted,
)
from headrace.spec.parameter_sets import loss_name


@dataclass(frozen=True)
class TrackedValue:
    """A value of the curve `tag` at a step; `time_s` is wall time in seconds since 1970."""

    tag: str
    value: float
    step: int
    time_s: float


@dataclass(frozen=True)
class TrackedText:
    """A line about what happened; see `TrackedValue`."""

    tag: str
    text: str
    step: int
    time_s: float


@dataclass(frozen=True)
class TrackedPicture:
    """A PNG file; see `TrackedValue`."""

    tag: str
    path: str
    step: int
    time_s: float


Tracked = TrackedValue | TrackedText | TrackedPicture


class EventCurves:
    """Turns one run's events into values and texts.

    `loss` by step (`loss/<set>` where sets of parameters take turns) is the weighted mean over the workers, known when
    as many of them have reported the step as there are, or, where workers do not go in step, when each of them is
    beyond it; `seconds/<part>/rank-<n>` is where each worker's step went. Workers may join and leave.
    """

    def __init__(self, started: RunStarted) -> None:
        self._workers = set(range(started.workers))
        self._began = 0.0
        # A text that is no time leaves a relative axis right.
        with suppress(ValueError):
            self._began = datetime.fromisoformat(started.started_at).timestamp() - started.time_s
        self._open_rounds: dict[int, list[Stepped]] = defaultdict(list)
        self._latest: dict[int, int] = {}
        self._first_open = 0

    def take(self, event: Event) -> Iterator[Tracked]:
        """Yields what is known now; kinds without a value over time give nothing."""
        time_s = self._began + event.time_s
        match event:
            case Stepped():
                for part in STEPPED_PARTS:
                    tag = f"seconds/{part.removesuffix('_s')}/rank-{event.rank}"
                    yield TrackedValue(tag, getattr(event, part), event.step, time_s)
                yield from self._add_to_round(event)
            case Evaluated():
                for name, value in event.metrics.items():
                    yield TrackedValue(f"evaluation/{name}", value, event.step, time_s)
            case ParametersAveraged():
                yield TrackedValue("averaging/drift", event.drift, event.step, time_s)
                yield TrackedValue("averaging/period", event.period, event.step, time_s)
            case SharesBalanced():
                for rank, size in enumerate(event.sizes):
                    yield TrackedValue(f"shares/rank-{rank}", size, event.step, time_s)
            case Saved():
                yield TrackedValue("checkpoints/stall_s", event.stall_s, event.step, time_s)
                yield TrackedValue("checkpoints/bytes", event.bytes, event.step, time_s)
            case ValuesLogged():
                for name, value in logged_curves(event).items():
                    yield TrackedValue(name, value, event.step, time_s)
            case PictureLogged():
                yield TrackedPicture(event.name, event.path, event.step, time_s)
            case TextLogged():
                yield TrackedText(event.name, event.text, event.step, time_s)
            case NonFinite():
                yield TrackedText("not finite", f"{event.action}, {non_finite_text(event)}", event.step, time_s)
            case WorkerStarted():
                self._workers.add(event.rank)
            case WorkerEnded():
                self._leave(event.rank)
            case Lost():
                if not event.replaced:
                    self._leave(event.lost)
                yield TrackedText("lost", event.line, 0, time_s)
            case Notice():
                yield TrackedText("notice", event.text, 0, time_s)
            case Failed():
                yield TrackedText(f"failed/rank-{event.rank}", event.cause, event.step, time_s)
            case RunEnded() if event.words:
                yield TrackedText("ended", f"{event.status}: {event.words}", 0, time_s)

    def rest(self) -> Iterator[TrackedValue]:
        """Yields the losses of the steps that not every worker has finished."""
        for step in sorted(self._open_rounds):
            yield from self._loss(step)

    def _add_to_round(self, event: Stepped) -> Iterator[TrackedValue]:
        """Adds a worker's step to its round, and yields the losses of the rounds that are complete."""
        if event.step < self._first_open:
            return  # A repeated lease: the curve has this round already.
        self._open_rounds[event.step].append(event)
        self._latest[event.rank] = max(event.step, self._latest.get(event.rank, 0))
        if self._workers <= self._latest.keys():
            self._first_open = max(self._first_open, min(self._latest.values()))
        for step in sorted(self._open_rounds):
            reports = self._open_rounds[step]
            # One that has left since counts where it has taken part.
            if step < self._first_open or len(reports) == len(self._workers | {each.rank for each in reports}):
                yield from self._loss(step)

    def _leave(self, rank: int) -> None:
        self._workers.discard(rank)
        self._latest.pop(rank, None)

    def _loss(self, step: int) -> Iterator[TrackedValue]:
        parts = [event for event in self._open_rounds.pop(step) if event.loss is not None]
        weight = sum(event.weight for event in parts)
        if weight > 0:
            loss = sum((event.loss or 0.0) * event.weight for event in parts) / weight
            tag = loss_name(parts[0].turn) if parts[0].turn else "loss"
            yield TrackedValue(tag, loss, step, self._began + max(event.time_s for event in parts))
