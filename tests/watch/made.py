"""Runs that never ran, and what a page knows of them after every message of the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headrace.spec.events import LAUNCHER, Event, RunStarted, Stepped, WorkerStarted
from headrace.watch.state import WatchedRun
from headrace.watch.steps import LineReader, Steps
from report.conftest import append

NAN = float("nan")


def write(run_dir: Path, *events: Event) -> Path:
    """Appends events to the files of their processes."""
    return append(run_dir, events)


def started(time_s: float = 0.0, workers: int = 2, resumed: int = 0, strategy: str = "mirrored") -> RunStarted:
    versions = {"headrace": "0.1.0"}
    return RunStarted(
        LAUNCHER, time_s, strategy, workers, "cpu", 1, 8 * workers, 80 * workers, "2026-01-01T00:00:00", {}, versions,
        resumed_step=resumed,
    )  # fmt: skip


def steps(rank: int, numbers: Iterable[int], begin_s: float = 1.0, seconds: float = 0.1) -> list[Event]:
    """Steps one after the other, of 8 examples each: half compute, 0.3 exchange, 0.1 update, 0.1 waiting for data."""
    return [
        Stepped(
            rank, begin_s + seconds * (index + 1), step, 0, 8, 10.0 / (step + 1) + rank, 8.0,
            seconds * 0.1, seconds * 0.5, seconds * 0.3, seconds * 0.1,
        )
        for index, step in enumerate(numbers)
    ]  # fmt: skip


def begun(rank: int, time_s: float = 0.9, host: str = "mill") -> WorkerStarted:
    return WorkerStarted(rank, time_s, host, 100 + rank, "cpu", 1)


@dataclass(frozen=True)
class Found:
    """What lines hold: steps, other events, what is wrong, and the end of the last step."""

    steps: Steps | None
    events: list[Event]
    bad: list[str]
    last_s: float


def read_lines(lines: Iterable[bytes], before_s: float = NAN) -> Found:
    reader = LineReader()
    last_s = reader.read(lines, "file", before_s)
    return Found(reader.steps(), reader.events, reader.bad["file"], last_s)


def read(run: WatchedRun) -> WatchedRun:
    """Takes all that is there."""
    while True:
        news = run.poll()
        if not run.apply(news) and not news.more:
            return run


class Page:
    """What a page has put together; the same as its script does."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._revision = -1
        self.known: dict[str, Any] = {}

    def update(self) -> dict[str, Any]:
        """Takes a message through JSON; returns all that is known."""
        curves, details = self._run.curves(self._revision), self._run.details(self._revision)
        assert details["run"].pop("age_s") >= 0
        self._revision = self._run.revision
        plain = orjson.loads(orjson.dumps([curves, details], option=orjson.OPT_SERIALIZE_NUMPY))
        if plain[0]["whole"]:
            self.known = {}
        for name, value in (*plain[0].items(), *plain[1].items()):
            if name == "loss":
                self._loss(value)
            elif name in ("lanes", "recent"):
                self._lanes(name, value)
            elif name not in ("revision", "whole"):
                self.known[name] = value
        return self.known

    def _loss(self, message: dict[str, Any]) -> None:
        before = self.known.get("loss", {})
        first, count = message["first"], message["count"]
        self.known["loss"] = {
            name: [*before.get(name, [])[:first], *message[name]][:count] for name in ("examples", "seconds")
        }
        losses = before.get("losses", {})
        self.known["loss"]["losses"] = {
            name: [*losses.get(name, [None] * first)[:first], *values][:count]
            for name, values in message["losses"].items()
        }

    def _lanes(self, name: str, message: dict[str, Any]) -> None:
        before = self.known.get(name, {"width_s": 0, "bins": {}})
        bins = before["bins"] if before["width_s"] == message["width_s"] else {}
        bins = {**bins, **dict(zip(message["bins"], message["parts"], strict=True))}
        last = max(bins)
        kept = {bin_: parts for bin_, parts in bins.items() if name == "lanes" or bin_ > last - 120}
        self.known[name] = {"width_s": message["width_s"], "ranks": message["ranks"], "bins": kept}
