"""What the monitor makes of the ends of a run's processes, which a stand-in for the fork server tells."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headrace as hr
from headrace.engine.local import engine
from headrace.engine.local.monitor import Monitor
from headrace.errors import PeerLost, WorkerFailed
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import Failed
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import Role
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import AttemptInfo, log_path

KILLED = -9


class Ends:
    """Tells which processes have ended, one by one, and those that are killed."""

    def __init__(self, *ends: tuple[int, int]) -> None:
        self.left = list(ends)
        self.looks = 0
        self.started: list[int] = []

    def ended(self, timeout_s: float) -> list[tuple[int, int]]:
        self.looks += 1
        assert self.looks < 100_000
        return [self.left.pop(0)] if self.left else []

    def kill(self, ranks: list[int]) -> None:
        self.left += [(rank, KILLED) for rank in ranks]

    def start(self, role: Role) -> None:
        """Starts a process that is killed at once."""
        self.started.append(role.rank)
        assert len(self.started) < 20
        self.left.append((role.rank, KILLED))

    def check(self, timeout_s: float) -> None:
        """It is never stopped."""

    def is_alive(self) -> bool:
        return True


def follow(run_dir: Path, strategy: hr.Strategy, ends: Ends, began_s: float = 0.0) -> None:
    """Follows a run to its end."""
    plan = strategy.plan(ModelSpec((ParameterSpec("weight", (8,)),)), Cluster((Host("a", 2, 1 << 30),)))
    attempt = AttemptInfo(began_s)
    spec: Any = SimpleNamespace(
        plan=plan, run_dir=run_dir, started=0.0, timeout_s=60.0, attempt=attempt, snapshots_every_s=None
    )
    page = ControlPage.create(len(plan.roles))
    Monitor(spec, page, ends, ends.start, lambda _: None).follow()  # type: ignore[arg-type]


def fail(run_dir: Path, rank: int, time_s: float, cause: str) -> None:
    """Writes what a process writes that fails."""
    with closing(EventWriter(run_dir, rank, 0.0)) as events:
        events.write(Failed(rank, time_s, 0, cause, ""))


def test_the_first_of_several_failures_explains_the_others(tmp_path: Path) -> None:
    fail(tmp_path, 0, 7.5, "ValueError: later")
    fail(tmp_path, 1, 7.25, "KeyError: first")
    with pytest.raises(WorkerFailed, match=r"rank 1 .*KeyError: first"):
        follow(tmp_path, hr.Mirrored(2), Ends((0, 1), (1, 1)))


def test_a_failure_of_an_earlier_attempt_is_not_told_again(tmp_path: Path) -> None:
    fail(tmp_path, 0, 7.5, "ValueError: of yesterday")
    log_path(tmp_path, 0).parent.mkdir()
    log_path(tmp_path, 0).write_text("its last words")
    with pytest.raises(WorkerFailed, match="exit code 3 without an error of its own") as caught:
        follow(tmp_path, hr.OneDevice(), Ends((0, 3)), began_s=8.0)
    assert "its last words" in caught.value.traceback


def test_a_worker_that_is_lost_before_it_does_anything_is_replaced_a_few_times(tmp_path: Path) -> None:
    ends = Ends((0, KILLED))
    with pytest.raises(PeerLost, match="the 5th time in a row before it did anything"):
        follow(tmp_path, hr.Downpour(2), ends)
    assert ends.started == [0] * 4


def test_ranks_of_a_script_that_wait_for_a_failed_one_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_GRACE_S", 0.01)
    logs = [tmp_path / str(rank) for rank in range(3)]
    logs[0].touch()
    logs[0].with_suffix(".out").write_text("what rank 0 printed\n")
    ends = Ends((1, 3))
    stdout = io.StringIO()
    assert engine._follow_script(ends, logs, stdout) == {1: 3}  # type: ignore[arg-type]
    assert stdout.getvalue() == "what rank 0 printed\n"
    assert ends.left == [(0, KILLED), (2, KILLED)]
