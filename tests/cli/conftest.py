"""A trainer and an engine that do nothing but write down what they were asked, and leave a run behind."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.jobfile import MODULE
from headrace.report.model.summary import summarize
from headrace.report.model.verdict import References
from headrace.spec.events import (
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    Stepped,
    WorkerEnded,
    WorkerStarted,
    encode,
)
from headrace.spec.job import Job

JOB = """
import headrace.spec.job
from headrace.spec.job import Job

def job(lr=0.1, epochs=2, name="plain", augment=False):
    loss = lambda output, target: None
    return Job(model=dict, optimizer=dict, data=(lr, name, augment), global_batch_size=8, loss=loss, epochs=epochs)
"""


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what loading a job file does to the process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for name in ("CI", "NO_COLOR", "TERM", "FORCE_COLOR", "COLUMNS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    sys.modules.pop(MODULE, None)


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file in the working directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "digits.py"
    file.write_text(JOB)
    return file


def run_events(strategy: str = "mirrored", workers: int = 2, status: str = "ok") -> dict[int, list[Event]]:
    """The events of a short run, by rank; -1 is the launcher."""
    plan: Mapping[str, object] = {"shares": [1] * workers}
    events: dict[int, list[Event]] = {
        -1: [
            RunStarted(-1, 0.0, strategy, workers, "cpu", 1, 8, 20, "2026-01-01T00:00:00", plan, {"torch": "2.13.0"}),
            RunEnded(-1, 9.0, status),
        ]
    }
    for rank in range(workers):
        steps = [Stepped(rank, 1 + step, step, 0, 8 // workers, 0.5, 4, 0.1, 0.5, 0.2, 0.1) for step in range(6)]
        events[rank] = [
            WorkerStarted(rank, 0.5, "host", 100 + rank, "cpu", 1),
            *steps,
            WorkerEnded(rank, 8.5, 6, 4096, 1 << 20, 400, 400),
        ]
    events[0].insert(-1, Evaluated(0, 8.0, 6, 2, 10, {"accuracy": 0.875, "loss": 0.25}, 0.5))
    return events


def write_run(run_dir: Path, events: Mapping[int, Sequence[Event]]) -> None:
    """Writes the event files and a model."""
    folder = run_dir / "events"
    folder.mkdir(parents=True)
    for rank, lines in events.items():
        file = folder / ("launcher.jsonl" if rank < 0 else f"rank-{rank}.jsonl")
        file.write_text("".join(encode(line) + "\n" for line in lines))
    (run_dir / "model.safetensors").write_bytes(b"")


@dataclass
class Stage:
    """What the fake trainer and engine saw, in order, and what they shall do."""

    seen: list[str] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    job: Job | None = None
    chosen: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    status: str = "ok"
    said: str = ""

    def play(self, run_dir: Path, strategy: str, on_event: Sequence[Callable[[Event], None]] | None) -> None:
        events = run_events(strategy, status=self.status)
        write_run(run_dir, events)
        for event in [events[-1][0], *events[0], events[-1][1]]:
            for take in on_event or ():
                take(event)
        if self.said:
            print(self.said)  # noqa: T201 - a user's program that prints
        if self.error is not None:
            raise self.error

    def fit(self, job: Job, strategy: Any, **asked: Any) -> Any:
        self.seen.append("fit")
        self.job, self.chosen, self.asked = job, [strategy], asked
        self.play(asked["run_dir"], strategy.name, asked["on_event"])
        return types.SimpleNamespace(interrupted=self.status == "interrupted")

    def compare(self, job: Job, strategies: Sequence[Any], **asked: Any) -> Any:
        self.seen.append("compare")
        self.job, self.chosen, self.asked = job, list(strategies), asked
        folders = [asked["run_dir"] / each.name for each in strategies]
        for folder in folders:
            self.play(folder, folder.name, asked["on_event"])
        return types.SimpleNamespace(
            summaries=tuple(summarize(folder) for folder in folders),
            references=References(one_device_examples_per_s=4.0, ceiling_examples_per_s={2: 10.0}),
            page=asked["run_dir"] / "report.html",
        )


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Fakes in the places of the trainer, the comparison and the local engine."""
    # The real strategies: torch is paid for here and not inside the first test.
    importlib.import_module("headrace.strategies")
    stage = Stage()

    class LocalEngine:
        def __init__(self, forks: bool) -> None:
            assert forks

        def __enter__(self) -> LocalEngine:
            stage.seen.append("engine begins" + (" after the job" if MODULE in sys.modules else ""))
            return self

        def __exit__(self, *error: object) -> None:
            stage.seen.append("engine ends")

    for name, content in {
        "headrace.api.fit": {"fit": stage.fit},
        "headrace.api.comparison": {"compare": stage.compare},
        "headrace.engine.local.engine": {"LocalEngine": LocalEngine},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return stage


@pytest.fixture
def make_run() -> Callable[..., None]:
    """`make_run(run_dir, strategy=..., workers=..., status=...)` leaves a run there."""

    def make(run_dir: Path, **what: Any) -> None:
        write_run(run_dir, run_events(**what))

    return make


@pytest.fixture
def events() -> Callable[..., dict[int, list[Event]]]:
    """`events(strategy, workers, status)`: the events of a short run, by rank."""
    return run_events
