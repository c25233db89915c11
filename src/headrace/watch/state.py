"""One run as the page shows it: what was read of its files, added up, and what has changed since a revision."""

from __future__ import annotations

import time
from bisect import insort
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.machine import disk
from headrace.machine.identity import own_version
from headrace.report.format import clean
from headrace.report.model.ending import LOCK, last_word
from headrace.report.model.events import is_done_again
from headrace.report.model.glance import Brief
from headrace.report.model.training import without
from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
)
from headrace.watch.bins import RECENT_WIDTH_S, LossBins, RecentLanes, RunLanes
from headrace.watch.limit import StepSums
from headrace.watch.records import DriftCurve, Evaluations, Journal, JournalLine, LoggedNumbers, ProcessTable, SaveLog
from headrace.watch.servers import ServersSeen
from headrace.watch.steps import Floats, Ints, Steps
from headrace.watch.tail import News, RunTail

_MOST_TEXT, _MOST_WORDS, _MOST_METRICS = 200, 4000, 8
_QUIET_S = 3.0
"""Who writes nothing for so long may be gone."""
_RATE_BINS, _UNSETTLED_BINS = 10, 3
"""The present rate is that of so many bins of the last minute, without the last ones, which workers still fill."""


class WatchedRun:
    """One run's event files and what has been read of them.

    Attributes:
        revision: grows with each change.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tail = RunTail(run_dir)
        self._lock = run_dir / LOCK
        self._is_left = self._left = False
        self.revision = 0
        self._complaints: list[str] = []
        self._complained = 0
        self._missing = 0.0
        self._grown_s: float | None = None
        self._late: list[RunStarted] = []
        self._clear()

    def _clear(self) -> None:
        self._born = self.revision
        self._loss, self._lanes, self._recent = LossBins(), RunLanes(), RecentLanes()
        self._saves, self._processes, self._evaluations = SaveLog(), ProcessTable(), Evaluations()
        self._journal, self._sums = Journal(), StepSums()
        self._parts: dict[
            str, Journal | SaveLog | DriftCurve | LoggedNumbers | ServersSeen | ProcessTable | StepSums
        ] = {
            "journal": self._journal,
            "saves": self._saves,
            "averaging": DriftCurve(),
            "numbers": LoggedNumbers(),
            "servers": ServersSeen(),
            "processes": self._processes,
            "parts": self._sums,
        }
        # The revision at which each part changed last.
        self._changed = dict.fromkeys(self._parts, -1)
        self._starts: list[RunStarted] = []
        self._ended: RunEnded | None = None
        self._windows: dict[int, tuple[float, float]] = {}
        self._until_s = 0.0

    def poll(self) -> News:
        """Returns what has been written; this may wait for a disk, and changes nothing that `message` reads."""
        news = self._tail.poll()
        grown_s = self._tail.grown_s()
        quiet = grown_s is not None and time.monotonic() - grown_s > _QUIET_S
        self._is_left = quiet and disk.is_left(self._lock)
        return news

    def apply(self, news: News) -> bool:
        """Takes what `poll` has returned; returns whether something has changed."""
        complaints, missing = self._tail.complaints(), self._tail.missing
        self._grown_s = self._tail.grown_s()
        told = complaints != self._complaints or missing != self._missing or self._is_left != self._left
        self._left = self._is_left
        if not (news.steps is not None or news.events or news.anew or told):
            return False
        self.revision += 1
        if news.anew:
            self._clear()
        if complaints != self._complaints:
            self._complaints, self._complained = complaints, self.revision
        if self._missing and not missing:
            self._born = self.revision  # What was estimated until now is known.
        self._missing = missing
        for event in news.events:
            self._take(event)
        if news.steps is not None:
            self._take_steps(news.steps)
        return True

    def _take(self, event: Event) -> None:
        self._until_s = max(self._until_s, event.time_s)
        for name, part in self._parts.items():
            if part.add(event):
                self._changed[name] = self.revision
        match event:
            case RunStarted():
                insort(self._starts, event, key=lambda each: each.time_s)
                repeats = len(self._starts) > 1 and self._loss.steps > event.resumed_step
                if repeats and event not in self._late:
                    # What is repeated counts once: it must not have been counted before. Once for each start, as a
                    # file that was changed may have one behind steps at every reading.
                    self._late.append(event)
                    self._tail.begin_anew()
            case RunEnded():
                if self._ended is None or event.time_s >= self._ended.time_s:
                    self._ended = event
            case Evaluated():
                later = (each for each in self._starts if each.time_s > event.time_s)
                if not any(is_done_again(event, each) for each in later):
                    self._evaluations.add(event, self.revision)

    def _take_steps(self, steps: Steps) -> None:
        self._until_s = max(self._until_s, float(steps.time_s.max()))
        self._processes.stepped(steps)
        self._changed["processes"] = self.revision
        self._lanes.add(steps, self.revision)
        self._recent.add(steps, self.revision)
        attempt = self._attempts(steps.time_s)
        again = np.zeros(len(steps), dtype=bool)
        for index, start in enumerate(self._starts):
            again |= (attempt < index) & steps.done_again(start)
        steps, attempt = steps.chosen(~again), attempt[~again]
        for index in np.unique(attempt).tolist():
            own = attempt == index
            begin, end = float(steps.began_s[own].min()), float(steps.time_s[own].max())
            before = self._windows.get(index, (begin, end))
            self._windows[index] = min(before[0], begin), max(before[1], end)
        self._loss.add(steps, self.revision)
        self._sums.add_steps(steps)
        self._changed["parts"] = self.revision

    def _attempts(self, time_s: Floats) -> Ints:
        starts = [each.time_s for each in self._starts]
        return (
            np.maximum(0, np.searchsorted(starts, time_s, side="right") - 1) if starts else time_s.astype(np.int64) * 0
        )

    def _training_s(self, time_s: Floats) -> Floats:
        """Returns the seconds of training until each time, without evaluations and between attempts."""
        pieces = [span for window in self._windows.values() for span in without(self._evaluations.pauses, *window)]
        spans = [(begin, end) for begin, end in pieces if end > begin]
        edges = sorted(edge for span in spans for edge in span)
        inside = {begin for begin, _ in spans}
        seconds, total = [0.0], 0.0
        for begin, end in pairwise(edges):
            total += end - begin if begin in inside else 0.0
            seconds.append(total)
        return np.interp(time_s, edges, seconds) if edges else np.zeros(len(time_s))

    @property
    def status(self) -> str:
        """ "running" until the launcher has written the end of the last attempt."""
        if not self._starts:
            return "no run yet"
        return clean(self._end.status)[:_MOST_TEXT] if self._end else "running"

    @property
    def _end(self) -> RunEnded | None:
        """How the last attempt has ended; None while it goes on."""
        if not self._starts:
            return None
        if self._ended is not None and self._ended.time_s >= self._starts[-1].time_s:
            return self._ended
        return last_word(self._lock.parent, None, None, self._starts[-1]) if self._left else None

    def rate(self) -> float | None:
        """Returns the examples a second of the last seconds."""
        _, rates = self._recent.rates(True, self._until_s)
        settled = rates[: len(rates) - _UNSETTLED_BINS][-_RATE_BINS:]
        return float(settled.mean()) if len(settled) > 1 else None

    def row(self) -> dict[str, Any]:
        """Returns the run in one line of the list of runs."""
        started = self._starts[-1] if self._starts else None
        return {
            "strategy": clean(started.strategy)[:_MOST_TEXT] if started else "",
            "workers": started.workers if started else None,
            "status": self.status,
            "step": self._loss.steps,
            "loss": self._loss.ends()[1],
            "rate": self.rate() if self.status == "running" else self._overall_rate(),
            "started_at": clean(started.started_at)[:_MOST_TEXT] if started else "",
            "rounds": started.rounds if started else 0,
        }

    def curves(self, since: int) -> dict[str, Any]:
        """Returns what has changed of the loss, the evaluations and the rate; all of it where the run was read anew."""
        if since < self._born:
            since = -1
        complete = self._missing == 0
        batch = self._starts[-1].global_batch_size if self._starts and not complete else None
        found: dict[str, Any] = {"revision": self.revision, "whole": since < 0}
        loss = self._loss.changed(since, batch)
        if loss is not None:
            loss["seconds"] = self._training_s(loss.pop("time_s")).astype(np.float32)
            loss["losses"] = {clean(name)[:_MOST_TEXT]: each for name, each in loss["losses"].items()}
            found["loss"] = loss
        if self._evaluations.revision > since:
            found["evaluations"] = self._evaluated()
        if self._lanes.changed(since) is not None:
            order, rates = self._lanes.rates(complete, self._until_s)
            found["rates"] = {"seconds": (order + 0.5) * self._lanes.width_s, "rate": rates.astype(np.float32)}
        return found

    def details(self, since: int) -> dict[str, Any]:
        """Returns what has changed of everything else."""
        if since < self._born:
            since = -1
        found: dict[str, Any] = {"revision": self.revision, "whole": since < 0, "run": self._facts()}
        found |= {
            name: each
            for name, lanes in (("lanes", self._lanes), ("recent", self._recent))
            if (each := lanes.changed(since)) is not None
        }
        if self._complained > since:
            found["complaints"] = self._complaints
        for name, part in self._parts.items():
            if self._changed[name] > since:
                found[name] = part.message()
        if "processes" in found:
            shares = self._recent.shares()
            found["processes"] = [each | {"shares": shares.get(each["rank"])} for each in found["processes"]]
        return found

    def _facts(self) -> dict[str, Any]:
        started = self._starts[-1] if self._starts else None
        an_epoch = started.examples_per_epoch if started else 0
        versions = dict(started.versions) if started else {}
        if versions.get("headrace") == own_version():
            versions.pop("headrace")
        return self.row() | {
            "device": clean(started.device)[:_MOST_TEXT] if started else "",
            "threads": started.threads if started else None,
            "batch": started.global_batch_size if started else None,
            "versions": {clean(name)[:_MOST_TEXT]: clean(each)[:_MOST_TEXT] for name, each in versions.items()},
            "attempts": len(self._starts),
            "until_s": self._until_s,
            "age_s": time.monotonic() - self._grown_s if self._grown_s is not None else None,
            "examples": self._loss.examples if self._missing == 0 else None,
            "epochs": self._loss.examples / an_epoch if an_epoch and self._missing == 0 else None,
            "missing": self._missing,
            "checkpoints": self._saves.count,
            "peak": self._processes.peak,
            "bin_s": RECENT_WIDTH_S,
            "words": clean(self._end.words)[:_MOST_WORDS] if self._end else "",
            "command": clean(started.command)[:_MOST_WORDS] if started else "",
            "model": clean(started.model)[:_MOST_TEXT] if started else "",
            "optimizer": clean(started.optimizer)[:_MOST_TEXT] if started else "",
            "an_epoch": an_epoch,
            **self._brief(),
            "marks": self._marks(),
        }

    def _brief(self) -> dict[str, Any]:
        """Returns the sentence and the four values that the report begins with."""
        if not self._starts:
            return {"headline": "", "tiles": []}
        row, started, evaluated = self.row(), self._starts[-1], self._evaluations.events
        metrics = dict(list(evaluated[-1].metrics.items())[:_MOST_METRICS]) if evaluated else {}
        brief = Brief(
            started,
            row["status"],
            clean(self._end.words)[:_MOST_WORDS] if self._end else "",
            self._loss.examples / started.examples_per_epoch if started.examples_per_epoch else 0.0,
            self._loss.steps,
            float(self._training_s(np.array([self._until_s]))[0]),
            row["rate"],
            {clean(name)[:_MOST_TEXT]: value for name, value in metrics.items()},
            self._loss.ends(),
            self._sums.bottleneck(started),
        )
        return {"headline": clean(brief.headline)[: 2 * _MOST_WORDS], "tiles": brief.tiles}

    def _marks(self) -> list[dict[str, Any]]:
        """Returns faults, resumptions and an early end, where each stands in the charts."""
        lines = self._journal.marks(first_s=self._starts[0].time_s if self._starts else 0.0)
        if self._end is not None and self._end is not self._ended:
            # No process has written how it ended.
            lines.append(JournalLine(self._until_s, "ended", LAUNCHER, f"{self._end.status}: {self._end.words}"))
        seconds = self._training_s(np.array([each.time_s for each in lines], dtype=np.float64))
        return [
            {"time_s": each.time_s, "seconds": float(at), "examples": self._loss.examples_at(each.time_s)}
            | {"text": f"{each.kind}: {each.text}"[:_MOST_WORDS]}
            for each, at in zip(lines, seconds, strict=True)
        ]

    def _evaluated(self) -> list[dict[str, Any]]:
        events = self._evaluations.events
        seconds = self._training_s(np.array([each.time_s for each in events], dtype=np.float64))
        return [
            {
                "step": each.step,
                "examples": self._loss.examples_until(each.step),
                "seconds": float(at),
                "metrics": {clean(name)[:_MOST_TEXT]: value for name, value in each.metrics.items()},
            }
            for each, at in zip(events, seconds, strict=True)
        ]

    def _overall_rate(self) -> float | None:
        seconds = float(self._training_s(np.array([self._until_s]))[0])
        return self._loss.examples / seconds if seconds > 0 and self._missing == 0 else None
