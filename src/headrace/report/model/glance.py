"""Runs at a glance: those below a directory, each in one line, from the edges of its files; one in a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.machine import disk
from headrace.report.format import clean, duration, plural, short
from headrace.report.model.bottleneck import Bottleneck
from headrace.report.model.ending import LOCK, UNFINISHED
from headrace.report.model.remedies import fewer_workers, shared_cores
from headrace.spec.events import Event, RunEnded, RunStarted, Stepped, decode

DEPTH = 2
"""A directory of comparisons has runs two levels below."""
_GLANCE = 16 << 10
_MOST_RANKS = 64
_DIVERGED = 2.0
"""A loss that ends above so many times where it began has diverged."""


@dataclass(frozen=True)
class Brief:
    """A run, ended or not, in the few values that its sentence and its tiles are made of.

    `words` are cause and remedy of an early end; `metrics` those of the last evaluation; `losses` the first and the
    last of training.
    """

    started: RunStarted
    status: str
    words: str
    epochs: float
    steps: int
    seconds: float
    examples_per_s: float | None
    metrics: Mapping[str, float]
    losses: tuple[float | None, float | None]
    bottleneck: Bottleneck | None

    @property
    def headline(self) -> str:
        """One sentence: how it ended where it did not do all its rounds, what it reached, and how fast."""
        end = {"ok": "Done after", "running": "Running for"}.get(self.status, f"{self.status.capitalize()} after")
        told = f": {self.words}" if self.words else ""
        reached = ", ".join(f"{name} {short(value)}" for name, value in self.metrics.items())
        after = f"{plural(self.epochs, 'epoch')}, {plural(self.steps, 'step')} in {duration(self.seconds)}"
        because = self.bottleneck.because if self.bottleneck else ""
        result, limit = (f" {text[:1].upper()}{text[1:]}." if text else "" for text in (reached, because))
        odd = f" Remark: {self.remarks}." if self.remarks else ""
        return f"{end} {after}{told}.{result}{odd}{limit}"

    @property
    def remarks(self) -> str:
        """What is odd about a run that ends well: a loss that rose, more processes than cores; "" else."""
        found = []
        first, last = self.losses
        if self.status != "failed" and first is not None and last is not None and 0 < _DIVERGED * first < last:
            found.append(
                f"the training loss ended at {short(last)}, {short(last / first)} × where it began: "
                "it has diverged; lower the learning rate, or clip the gradients (Options(clip_norm=1.0))"
            )
        if shared := shared_cores(self.started):
            change = fewer_workers(self.started)
            fewer = change.told(self.started) if change else "give it more cores"
            found.append(f"{shared}, and each waits for its turn; {fewer}")
        return "; ".join(found)

    @property
    def tiles(self) -> tuple[tuple[str, str], ...]:
        """Four values that most look for: what was reached, in how much time, how fast, and what limits it."""
        names = sorted(self.metrics, key=lambda name: name == "loss")
        reached = (names[0], short(self.metrics[names[0]])) if names else ("training loss", short(self.losses[1]))
        limit = self.bottleneck.kind.lower().replace("-bound", "").replace("- and", " and") if self.bottleneck else "–"
        return (
            reached,
            ("training time", duration(self.seconds)),
            ("examples/s", short(self.examples_per_s)),
            ("limited by", limit),
        )


def runs_below(path: Path) -> list[Path]:
    """Returns the directories of runs: this one, or those below it; each once, however many links lead to it."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    level = [path]
    for depth in range(DEPTH + 1):
        below: list[Path] = []
        for each in level:
            if _is_run(each):
                found.append(each)
            elif depth < DEPTH:
                below += _folders(each, seen)
        level = below
    return sorted(found)


def _folders(path: Path, seen: set[tuple[int, int]]) -> list[Path]:
    """Returns the directories in one that were not seen before."""
    found = []
    try:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if entry.is_dir():
                    stat = entry.stat()
                    if (place := (stat.st_dev, stat.st_ino)) not in seen:
                        seen.add(place)
                        found.append(path / entry.name)
    except OSError:
        return found
    return found


def _is_run(path: Path) -> bool:
    try:
        with os.scandir(path / "events") as entries:
            return any(entry.name.endswith(".jsonl") for entry in entries)
    except OSError:
        return False


def glanced(run_dir: Path) -> dict[str, Any]:
    """Returns a run in one line of a list, from the begin and the end of its files."""
    row: dict[str, Any] = dict.fromkeys(("workers", "step", "loss", "rate"))
    row |= {"strategy": "", "status": "no run yet", "started_at": "", "rounds": 0}
    for event in _events(_edges(run_dir / "events" / "launcher.jsonl")):
        match event:
            case RunStarted():
                row |= {"strategy": clean(event.strategy), "workers": event.workers, "status": "running"}
                row |= {"started_at": clean(event.started_at), "rounds": event.rounds}
            case RunEnded():
                row["status"] = clean(event.status)
    if row["status"] == "running" and disk.is_left(run_dir / LOCK):
        row["status"] = UNFINISHED
    return row | _progress(run_dir / "events")


def _progress(events: Path) -> dict[str, Any]:
    """Returns the last step, and the mean loss of the workers in the last step that all of them have."""
    losses: dict[int, dict[int, tuple[float, float]]] = {}
    for file in sorted(events.glob("rank-*.jsonl"))[:_MOST_RANKS]:
        for event in _events(_edges(file)):
            if isinstance(event, Stepped):
                of_step = losses.setdefault(event.step, {})
                of_step[event.rank] = (event.loss, event.weight) if event.loss is not None else (0.0, 0.0)
    if not losses:
        return {}
    most = max(map(len, losses.values()))
    parts = losses[max(step for step, each in losses.items() if len(each) == most)].values()
    weight = sum(each for _, each in parts)
    loss = sum(value * each for value, each in parts) / weight if weight else None
    return {"step": max(losses) + 1, "loss": loss}


def _events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yields the events; half a line at an edge is none, and who looks at the run is told of lines that are wrong."""
    for line in lines:
        with suppress(ValueError):
            yield decode(line)


def _edges(file: Path) -> list[bytes]:
    """Returns the lines at the begin and at the end of a file; none of a pipe, which would be waited for."""
    if not file.is_file():
        return []
    try:
        with file.open("rb") as stream:
            begin = stream.read(_GLANCE)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(len(begin), size - _GLANCE))
            end = stream.read()
    except OSError:
        return []
    return [*begin.split(b"\n"), *end.split(b"\n")]
