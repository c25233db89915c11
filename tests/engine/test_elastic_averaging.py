"""Workers and servers that are lost while parameters are averaged: every example moves the average once an epoch."""

from __future__ import annotations

import functools
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import headrace as hr
from engine.conftest import until
from engine.test_elastic import BATCH, EXAMPLES, Hand, check_counts, counting_job
from headrace.engine.local import LocalEngine
from headrace.engine.staffing import ask_for_workers
from headrace.errors import PeerLost
from headrace.ps.server import Server
from headrace.spec.event import Event, Notice, ServerStarted, SnapshotTaken, Stepped, WorkerEnded
from headrace.spec.plan import Plan
from headrace.strategies.strategy import ServerParts

pytestmark = pytest.mark.slow

PERIOD = 3
EPOCHS = 100


@dataclass(frozen=True)
class Counted(hr.ParameterAveraging):
    """Moves the average by all that was trained on, however many have contributed to it, so that it can be counted."""

    via: str = "server"
    period: int = PERIOD

    def server(self, plan: Plan, rank: int, parts: ServerParts) -> Server:
        return self._service.server(plan, rank, parts, by_share=True)


def averaged_job(epochs: int = EPOCHS, **changes: object) -> hr.Job:
    # What a lease has moved counts as often as it has rounds.
    return counting_job(epochs, optimizer=functools.partial(torch.optim.SGD, lr=BATCH / PERIOD), **changes)


@pytest.mark.parametrize("wait", ["all", 2, 0.2], ids=["all", "two", "seconds"])
def test_killed_workers_are_replaced_and_no_example_is_lost_or_doubled(engine: LocalEngine, wait: float) -> None:
    hand = Hand({100: (1, signal.SIGKILL), 300: (0, signal.SIGKILL)})
    check_counts(hr.fit(averaged_job(), Counted(3, wait=wait), engine=engine, on_event=hand), EPOCHS)
    assert sorted(lost.lost for lost in hand.lost) == [0, 1]


@pytest.mark.parametrize("wait", ["all", 2], ids=["all", "two"])
def test_a_killed_server_with_a_backup_is_followed_by_it(engine: LocalEngine, wait: float) -> None:
    hand = Hand({150: (3, signal.SIGKILL)}, after=4)
    check_counts(hr.fit(averaged_job(), Counted(3, wait=wait, backups=1), engine=engine, on_event=hand), EPOCHS)
    assert [lost.lost for lost in hand.lost] == [3]


def test_workers_join_and_leave_a_run_that_waits_for_all(tmp_path: Path) -> None:
    said: list[str] = []

    def staff() -> None:
        assert until(lambda: any((tmp_path / "run" / "events").glob("rank-1.jsonl")), 60)
        said.append(ask_for_workers(tmp_path / "run", 1, 60))
        assert until(lambda: (tmp_path / "run" / "events" / "rank-3.jsonl").exists(), 60)
        said.append(ask_for_workers(tmp_path / "run", -2, 60))

    thread = threading.Thread(target=staff)
    thread.start()
    with LocalEngine() as fresh:
        run = hr.fit(averaged_job(600), Counted(2), engine=fresh, run_dir=tmp_path / "run")
    thread.join()
    check_counts(run, 600)
    assert [line.split(":")[0] for line in said] == ["3 workers from now on", "1 worker from now on"]
    assert sorted(event.rank for event in run.events if isinstance(event, WorkerEnded)) == [0, 1, 3]


class Killer:
    """Kills the server when there is a snapshot with some of what was trained on."""

    def __init__(self) -> None:
        self._pid, self._steps, self._taken = 0, 0, 0

    def __call__(self, event: Event) -> None:
        self._steps += isinstance(event, Stepped)
        if isinstance(event, ServerStarted):
            self._pid = event.pid
        elif isinstance(event, SnapshotTaken) and self._steps > 200:
            self._taken += 1
            if self._taken == 2:
                os.kill(self._pid, signal.SIGKILL)


def test_a_run_goes_on_from_snapshots_of_its_servers(engine: LocalEngine, tmp_path: Path) -> None:
    held_out = (torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES))
    job = averaged_job(eval_data=held_out, options=hr.Options(eval_every=81 * PERIOD))
    saves = hr.Checkpoints(every_s=None, every_steps=100 * PERIOD, snapshots_every_s=0.05)
    fit = functools.partial(hr.fit, job, Counted(3), engine=engine, run_dir=tmp_path, checkpoints=saves)
    with pytest.raises(PeerLost, match="goes on from the servers' last snapshots"):
        fit(on_event=Killer())
    run = fit(resume=True)
    check_counts(run, EPOCHS)
    assert any("the servers go on from snapshots" in event.text for event in run.events if isinstance(event, Notice))
